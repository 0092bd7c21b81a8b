"""What real checkpoints have now and then: NaN, and blocks that do nothing."""

import numpy as np
import pytest
import torch
from conftest import prompts_of, stacked, task_of
from tiny_models import LAYERS, build_tiny_model
from transformers import AutoModelForCausalLM

from wllm_ray.errors import NotOfferedError

# The self-test's prompts keep away from the first tokens.
POISON = 25


@pytest.fixture(scope="module")
def changed(tmp_path_factory):
    """``changed("qwen3", change)`` → a tiny model whose weights ``change`` has altered."""

    def build(family, change, dtype=torch.float32):
        path = build_tiny_model(family, tmp_path_factory.mktemp(family) / family, dtype)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
        with torch.no_grad():
            change(model)
        model.save_pretrained(path)
        return path

    return build


@pytest.mark.requirement("C-3", "D-3")
def test_a_row_with_nan_spreads_to_no_later_row(open_engine, changed):
    """Attention multiplies what is left in a reused block of the cache by zero."""

    def poison(model):
        model.get_input_embeddings().weight[POISON] = torch.nan

    prompts = [np.where(p == POISON, POISON + 1, p) for p in prompts_of([20, 33, 47, 90] * 8)]
    bad = prompts[3].copy()
    bad[:] = POISON
    with open_engine("qwen3", path=changed("qwen3", poison), prefill_split_tokens=1024) as engine:
        before = engine.capture(task_of(prompts))
        failed = engine.capture(task_of([bad]))
        after = engine.capture(task_of(prompts))
    assert failed.failures[0].code == "non_finite"
    assert before.failures == after.failures == {}
    np.testing.assert_array_equal(before.features, after.features)


@pytest.mark.requirement("C-5", "C-11")
def test_a_block_that_does_nothing_keeps_its_sites_and_its_model(open_engine, changed):
    def prune(model):
        last, second = model.model.layers[LAYERS - 1], model.model.layers[1]
        for projection in (last.mlp.down_proj, last.self_attn.o_proj, second.mlp.down_proj):
            projection.weight.zero_()

    sites = ["L1_attn_out", "L1_resid_mid", "L1_resid_post", "L3_resid_pre", "L3_resid_post"]
    with open_engine("qwen3", path=changed("qwen3", prune)) as engine:
        kinds = {one.kind: one.layers for one in engine.description.sites}
        found = stacked(engine.capture(task_of(prompts_of([9, 20]), sites=sites)))
        told = engine.description.selftest.checks
    assert kinds["resid_mid"] == tuple(range(LAYERS))
    # Zeros are no activation: what adds nothing is not offered, and the report says so.
    assert kinds["mlp_out"] == (0, 2)
    assert kinds["attn_out"] == (0, 1, 2)
    assert "not offered: L1_mlp_out, L3_attn_out, L3_mlp_out" in told["identities"]
    np.testing.assert_array_equal(found[:, 1], found[:, 2])
    np.testing.assert_array_equal(found[:, 3], found[:, 4])
    assert found[:, 0].any()
    assert "changes too little" in told["logits"]


@pytest.mark.requirement("C-10")
def test_a_stream_that_vllm_rescales_is_refused(open_engine):
    with pytest.raises(NotOfferedError, match="stream divided by"):
        open_engine(
            "deepseek_v2",
            dtype="float16",
            selftest=False,
            hf_overrides={"routed_scaling_factor": 4.0},
        )

"""What a model does not have, and what a precision does, on engines of their own."""

import numpy as np
import pytest
import torch
from conftest import prompts_of, task_of
from tiny_models import build_tiny_model

from wllm_ray.errors import NotOfferedError
from wllm_ray.sites import HookSite


@pytest.mark.requirement("C-9")
def test_a_mixer_on_a_layer_of_another_type_is_refused_before_it_runs(open_engine, monkeypatch):
    with open_engine("granite_hybrid", selftest=False) as engine:
        ran = []
        monkeypatch.setattr(engine._loop, "submit", ran.append)
        with pytest.raises(NotOfferedError) as error:
            engine.capture(task_of(prompts_of([5]), sites=["L1_attn_out", "L2_attn_out"]))
        assert error.value.code == "site_not_offered"
        assert "block 2" in error.value.message
        assert "mamba" in error.value.message
        assert "blocks with attn_out: 1" in error.value.message
        assert not ran
        offered = [one for one in engine.description.sites if one.kind == "attn_out"]
        assert [one.layers for one in offered] == [(1,)]
        assert HookSite(2, "mamba_out") in engine._anatomy.readings


@pytest.mark.requirement("C-10")
def test_matched_precision_runs_a_model_of_16_bits_in_float32(open_engine, tmp_path):
    path = build_tiny_model("qwen3", tmp_path / "model", torch.bfloat16)
    with open_engine("qwen3", path=path, precision="matched", selftest=False) as engine:
        told = engine.description.fingerprint
        features = engine.capture(task_of(prompts_of([9, 20]))).features
    assert (told.precision, told.engine_dtype) == ("matched", "float32")
    assert torch.get_float32_matmul_precision() == "highest"
    # A value of bfloat16 has nothing in its lower half.
    assert (features.view(np.uint32) & 0xFFFF).any()

"""Every row at every layer against Transformers, with the neighbouring layer as a control."""

import numpy as np
import pytest
from conftest import SPLIT, prompts_of, relative_l2, task_of
from tiny_models import HIDDEN, LAYERS, MAX_LEN, VOCAB

from wllm_ray.errors import CaptureError

pytestmark = pytest.mark.requirement("C-2", "C-4", "C-5", "C-14")

# Tiny models in float32 differ from Transformers by the order of additions: 1e-6 to 1e-5 was seen.
TIGHT = 1e-4
CLEARLY_WRONG = 1e-2
REQUIRED = ["qwen3", "llama", "gemma3", "gpt2"]
OTHERS = ["olmo2", "gpt_neox", "cohere", "stablelm", "granite", "opt_350m"]
# Mamba2 layers carry a state whose rounding depends on where a pass begins.
HYBRIDS = ["granite_hybrid"]


@pytest.fixture(scope="module", params=REQUIRED + OTHERS + HYBRIDS)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def prompts():
    """One token, the split size and its neighbours, its multiples, the model's limit, random."""
    edges = [1, 1, 2, 7, 8, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT, 2 * SPLIT + 1, MAX_LEN]
    return prompts_of(edges + np.random.default_rng(3).integers(1, 2 * SPLIT, 13).tolist())


@pytest.fixture(scope="module")
def expected(family, prompts, reference):
    return reference(family).all_rows(prompts)


# After `expected`: where vLLM runs a Transformers class, it changes that class for good.
@pytest.fixture(scope="module")
def family_engine(family, expected, open_engine):
    with open_engine(family) as started:
        yield started


def test_every_row_at_every_layer_is_the_right_one(prompts, expected, family_engine):
    chunk = family_engine.extract(task_of(prompts))
    assert chunk.failures == {}
    assert chunk.row_index.tolist() == list(range(len(prompts)))
    assert chunk.lengths.tolist() == [1] * len(prompts)
    assert chunk.features.shape == (len(prompts), LAYERS, HIDDEN)
    assert chunk.features.dtype == np.float32
    assert chunk.features.flags.c_contiguous
    assert relative_l2(chunk.features, expected).max() <= TIGHT
    shifted = np.roll(expected, 1, axis=1)
    assert relative_l2(chunk.features, shifted).min() > CLEARLY_WRONG
    rotated = np.roll(expected, 1, axis=0)
    distinct = [i for i in range(len(prompts)) if not np.array_equal(prompts[i], prompts[i - 1])]
    assert relative_l2(chunk.features, rotated)[distinct].min() > CLEARLY_WRONG


@pytest.mark.requirement("C-11", "D-3")
def test_the_engine_describes_itself(family, family_engine):
    told = family_engine.description
    assert (told.num_layers, told.hidden_size, told.vocab_size) == (LAYERS, HIDDEN, VOCAB)
    assert told.max_model_len == MAX_LEN
    assert told.served_model_name == f"tiny-{family}"
    assert told.site_kinds == ("resid_post",)
    assert told.fingerprint.engine_dtype == "float32"
    assert told.fingerprint.threads == 1
    assert told.fingerprint.prefill_split_tokens == SPLIT
    assert told.selftest.passed
    if family in HYBRIDS:
        assert told.fingerprint.reproducibility == "tolerance"
        assert 0.0 < told.selftest.measured_relative_l2 <= TIGHT
    else:
        assert told.fingerprint.reproducibility == "bitwise"
        assert told.selftest.measured_relative_l2 == 0.0
    assert told.selftest.prompt_lengths[-1] == MAX_LEN
    assert set(told.selftest.checks) == {"residual", "logits", "hooks", "rows"}
    assert {"wllm_ray", "vllm", "torch", "transformers", "numpy", "python"} <= set(told.versions)


@pytest.mark.requirement("C-16")
def test_one_token_more_than_the_model_takes_is_a_row_failure(family_engine):
    exact, longer = prompts_of([MAX_LEN, MAX_LEN + 1])
    chunk = family_engine.extract(task_of([longer, exact]))
    assert set(chunk.failures) == {0}
    assert chunk.failures[0].code == "too_long"
    assert f"{MAX_LEN + 1} tokens, the model takes {MAX_LEN}" in chunk.failures[0].message
    assert chunk.lengths.tolist() == [0, 1]


@pytest.mark.requirement("C-10")
@pytest.mark.parametrize("bf16_family", ["qwen3", "gemma3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_own(bf16_family, open_engine, reference):
    prompts = prompts_of([1, 5, 20, SPLIT + 1, 100])
    with open_engine(bf16_family, dtype="bfloat16") as started:
        assert started.description.fingerprint.engine_dtype == "bfloat16"
        found = started.extract(task_of(prompts)).features
    truth = reference(bf16_family).all_rows(prompts)
    yardstick = relative_l2(reference(bf16_family, "bfloat16").all_rows(prompts), truth)
    ours = relative_l2(found, truth)
    assert (ours.mean(axis=0) <= 2 * yardstick.mean(axis=0)).all()
    # Widening loses nothing: the stored float32 values are bfloat16 values.
    assert (found.view(np.uint32) & 0xFFFF == 0).all()


@pytest.mark.requirement("D-3")
def test_a_recurrent_state_is_not_called_bitwise_where_16_bits_hide_its_rounding(open_engine):
    with open_engine("granite_hybrid", dtype="bfloat16") as started:
        assert started.description.fingerprint.reproducibility == "tolerance"


def test_prompts_that_vllm_cannot_split_run_whole(open_engine, reference):
    """Latent attention on a CPU: vLLM switches prefill chunks off, and would wait for ever."""
    prompts = prompts_of([1, SPLIT, SPLIT + 1, 3 * SPLIT, 5, MAX_LEN, 30])
    expected = reference("deepseek_v2").all_rows(prompts)
    plain = {
        "attention_config": {"backend": "CPU_MLA"},
        "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
    }
    with open_engine("deepseek_v2", vllm_args=plain) as started:
        assert started.description.fingerprint.prefill_split_tokens >= MAX_LEN
        chunk = started.extract(task_of(prompts))
    assert chunk.failures == {}
    assert relative_l2(chunk.features, expected).max() <= TIGHT


@pytest.mark.requirement("C-11")
def test_a_kernel_that_garbles_rows_is_found_by_the_selftest(open_engine):
    """vLLM 0.32.0's rotary kernel for CPUs is wrong for this family."""
    plain = {"attention_config": {"backend": "CPU_MLA"}}
    with pytest.raises(CaptureError, match="self-test: the same prompt alone and in a batch"):
        open_engine("deepseek_v2", vllm_args=plain)

"""Families and dtypes on engines of their own: what is refused, and what class they are."""

import numpy as np
import pytest
from conftest import SPLIT, capture_everything, prompts_of, relative_l2, stacked, task_of
from tiny_models import MAX_LEN

from wllm_ray.errors import CaptureError

# vLLM 0.32.0's rotary kernel for CPUs is wrong for heads that it is given one by one.
_PLAIN_ROTARY = {"compilation_config": {"custom_ops": ["all", "-rotary_embedding"]}}
# vLLM multiplies the matrices of latent attention in another order; 1.6e-4 was seen.
_LATENT_TOLERANCE = 5e-4
_LATENT_ATTENTION = {"attention_config": {"backend": "CPU_MLA"}}


@pytest.mark.requirement("C-9", "C-10")
@pytest.mark.parametrize(
    ("bf16_family", "options"),
    [
        ("qwen3", {}),
        ("gemma3", {}),
        # Linear attention, with a state that the cache's default size does not expect.
        pytest.param("qwen3_next", {}, marks=pytest.mark.slow),
    ],
)
def test_bfloat16_is_as_near_to_float32_as_transformers_own(
    bf16_family, options, open_engine, reference
):
    prompts = prompts_of([1, 5, 20, SPLIT + 1, 100])
    truth = reference(bf16_family).all_sites(prompts)
    yardstick = reference(bf16_family, "bfloat16").all_sites(prompts)
    with open_engine(bf16_family, dtype="bfloat16", **options) as started:
        assert started.description.fingerprint.engine_dtype == "bfloat16"
        found = capture_everything(started, prompts)
    assert set(found) == set(truth)
    for name, rows in found.items():
        ours, theirs = (relative_l2(one, truth[name]).mean() for one in (rows, yardstick[name]))
        assert ours <= 2 * theirs, name
        # Widening loses nothing: the stored float32 values are bfloat16 values.
        assert (rows.view(np.uint32) & 0xFFFF == 0).all(), name


@pytest.mark.requirement("C-5")
def test_a_structure_that_is_not_understood_is_refused(open_engine):
    with pytest.raises(CaptureError, match=r"float32\[4, \d+, 128\]") as error:
        open_engine("gemma3n")
    assert error.value.code == "unknown_structure"


@pytest.mark.requirement("D-3")
def test_a_recurrent_state_is_not_called_bitwise_where_16_bits_hide_its_rounding(open_engine):
    with open_engine("granite_hybrid", dtype="bfloat16") as started:
        assert started.description.fingerprint.reproducibility == "tolerance"


@pytest.mark.requirement("C-2", "C-4")
def test_prompts_that_vllm_cannot_split_run_whole(open_engine, reference):
    """Latent attention on a CPU: vLLM switches prefill chunks off, and would wait for ever."""
    prompts = prompts_of([1, SPLIT, SPLIT + 1, 3 * SPLIT, 5, MAX_LEN, 30])
    expected = reference("deepseek_v2").all_rows(prompts)
    with open_engine("deepseek_v2", vllm_args=_LATENT_ATTENTION | _PLAIN_ROTARY) as started:
        assert started.description.fingerprint.prefill_split_tokens >= MAX_LEN
        chunk = started.capture(task_of(prompts))
    assert chunk.failures == {}
    assert relative_l2(stacked(chunk), expected).max() <= _LATENT_TOLERANCE


@pytest.mark.requirement("C-11")
def test_a_kernel_that_garbles_rows_is_found_by_the_selftest(open_engine):
    """vLLM 0.32.0's rotary kernel for CPUs is wrong for this family."""
    with pytest.raises(CaptureError, match="self-test: the same prompt alone and in a batch"):
        open_engine("deepseek_v2", vllm_args=_LATENT_ATTENTION)

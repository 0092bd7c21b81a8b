"""TransformersCapture: every site at every token, against hooks on the model and against vLLM."""

import importlib.metadata

import numpy as np
import pytest
import torch
from conftest import prompts_of, relative_l2
from layouts import STRUCTURES
from tiny_models import HIDDEN, LAYERS, MAX_LEN, VOCAB
from transformers_runs import build_long_rope, capture_all

from wllm_ray.errors import CaptureError, InvalidInputError, NotOfferedError
from wllm_ray.offered import offered_sites
from wllm_ray.records import CaptureTask, TokenRow

pytestmark = pytest.mark.requirement("C-13")

# Padding changes the order of additions and nothing else: up to 4e-6 was seen on these families.
TIGHT = 1e-5
AGAINST_VLLM = 1e-4
CLEARLY_WRONG = 1e-2
LENGTHS = [1, 20, 7, 65, 129, 64]
FAMILIES = (
    "qwen3",
    "gemma2",  # attention scores are capped, which PyTorch's fused attention leaves out
    "gemma3",
    "gpt2",
    "gptj",  # blocks return attention weights, too
    "cohere",
    "granite",
    "gpt_neox",
    "bloom",  # attention returns the stream with its branch in it
    "opt_350m",
    "qwen3_moe",
    "granite_hybrid",
)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def prompts():
    return prompts_of(LENGTHS)


@pytest.fixture
def run(transformers_process, tiny_model):
    """``run("qwen3", prompts)`` → description and chunk, from the process for Transformers."""
    return lambda family, *args, **options: transformers_process.submit(
        capture_all, str(tiny_model(family)), *args, **{"threads": 1} | options
    ).result()


def by_site(description, chunk):
    """Site name → [tokens of all rows, width]."""
    edges = np.cumsum([0, *chunk.widths])
    parts = np.split(chunk.features, edges[1:-1], axis=1)
    return {str(site): rows for site, rows in zip(offered_sites(description), parts, strict=True)}


def kinds_of(names, layer):
    return {name.partition("_")[2] for name in names if name.startswith(f"L{layer}_")}


@pytest.mark.requirement("C-5", "C-8", "C-9")
def test_every_site_at_every_token_is_what_transformers_has_there(family, prompts, run, reference):
    description, chunk = run(family, prompts)
    truth = reference(family)
    of_rows = [truth.sites(ids) for ids in prompts]
    expected = {name: np.concatenate([row[name] for row in of_rows]) for name in of_rows[0]}
    found = by_site(description, chunk)
    assert chunk.failures == {}
    assert chunk.lengths.tolist() == LENGTHS
    assert set(found) == set(expected)
    for name, rows in found.items():
        assert rows.shape == expected[name].shape, name
        assert relative_l2(rows, expected[name]).max() <= TIGHT, name
    for layer in range(1, LAYERS):
        for kind in kinds_of(found, layer) & kinds_of(found, layer - 1):
            below = expected[f"L{layer - 1}_{kind}"]
            assert np.median(relative_l2(found[f"L{layer}_{kind}"], below)) > CLEARLY_WRONG, kind


@pytest.mark.requirement("C-9", "C-11", "D-2")
def test_the_engine_describes_itself(family, run, prompts):
    told, _ = run(family, prompts[:1])
    assert (told.num_layers, told.hidden_size, told.vocab_size) == (LAYERS, HIDDEN, VOCAB)
    assert told.max_model_len == MAX_LEN
    blocks = [kinds_of(map(str, offered_sites(told)), layer) for layer in range(LAYERS)]
    assert blocks == [layout.kinds for layout in STRUCTURES[family].blocks]
    assert told.model.name == told.served_model_name
    assert told.model.revision.startswith("sha256:")
    assert told.depth_bounded
    assert told.selftest.passed
    assert set(told.selftest.checks) == {
        "residual",
        "logits",
        "hooks",
        "identities",
        "rows",
        "depth",
    }
    assert 0 < told.selftest.measured_relative_l2 <= TIGHT
    assert told.selftest.prompt_lengths[-1] == MAX_LEN
    marks = told.fingerprint
    assert (marks.engine, marks.engine_dtype, marks.precision) == (
        "transformers",
        "float32",
        "native",
    )
    version = importlib.metadata.version("transformers")
    assert marks.engine_version in (f"{version}+sdpa", f"{version}+eager")
    assert (marks.threads, marks.prefill_split_tokens) == (1, 0)
    assert marks.reproducibility == "tolerance"
    assert "vllm" not in told.versions
    assert told.versions["transformers"] == version
    assert told.versions["torch"] == torch.__version__
    assert {"wllm_ray", "python", "numpy", "pyarrow", "pydantic"} < set(told.versions)


@pytest.mark.requirement("C-9")
@pytest.mark.parametrize("compared", ["qwen3", "gemma3", "granite_hybrid"])
def test_vllm_offers_the_same_sites_with_the_same_values(compared, prompts, run, open_engine):
    description, chunk = run(compared, prompts)
    with open_engine(compared) as vllm:
        task = CaptureTask(
            offered_sites(vllm.description),
            "all_prompt",
            tuple(TokenRow(index, ids) for index, ids in enumerate(prompts)),
        )
        expected = by_site(vllm.description, vllm.capture(task))
        assert description.sites == vllm.description.sites
        assert description.positions == vllm.description.positions
        assert description.architecture == vllm.description.architecture
    found = by_site(description, chunk)
    assert set(found) == set(expected)
    for name, rows in found.items():
        assert relative_l2(rows, expected[name]).max() <= AGAINST_VLLM, name


@pytest.mark.requirement("P-3")
def test_a_loaded_module_gives_the_bits_of_its_files(prompts, run):
    from_files, by_path = run("qwen3", prompts)
    as_module, by_module = run("qwen3", prompts, loaded="AutoModelForCausalLM")
    assert np.array_equal(by_path.features, by_module.features)
    assert as_module.sites == from_files.sites
    assert as_module.model.revision != from_files.model.revision
    again, _ = run("qwen3", prompts[:1], loaded="AutoModelForCausalLM")
    assert again.model == as_module.model


@pytest.mark.requirement("C-11")
def test_a_model_without_a_head_is_proven_by_its_identities(prompts, run):
    with_head, whole = run("qwen3", prompts, loaded="AutoModelForCausalLM")
    headless, chunk = run("qwen3", prompts, loaded="AutoModel")
    assert with_head.selftest.checks["logits"].startswith("log-probabilities of 20 tokens")
    assert headless.selftest.checks["logits"].startswith("no head")
    assert "8 of 8 hold" in headless.selftest.checks["identities"]
    assert np.array_equal(chunk.features, whole.features)


@pytest.mark.requirement("D-3")
def test_rows_that_share_no_pass_are_bitwise_the_same_in_any_company(prompts, run):
    told, together = run("qwen3", prompts, sequences_per_call=1)
    assert told.fingerprint.reproducibility == "bitwise"
    assert told.selftest.measured_relative_l2 == 0.0
    _, backwards = run("qwen3", prompts[::-1], sequences_per_call=1)
    rows = np.split(together.features, np.cumsum(LENGTHS)[:-1])
    assert np.array_equal(np.concatenate(rows[::-1]), backwards.features)


def test_rows_never_share_a_pass_with_rows_that_change_the_models_rotary_factors(
    tmp_path, transformers_process
):
    """Long RoPE: a pass longer than 64 tokens computes all its rows with other factors."""
    transformers_process.submit(build_long_rope, tmp_path, 64).result()
    prompts = prompts_of([20, 70, 64, 65, 3])
    apart = transformers_process.submit(capture_all, str(tmp_path), prompts, sequences_per_call=1)
    batched = transformers_process.submit(capture_all, str(tmp_path), prompts)
    expected, found = apart.result()[1].features, batched.result()[1].features
    assert relative_l2(found, expected).max() <= TIGHT


@pytest.mark.requirement("C-10")
def test_matched_runs_a_16_bit_checkpoint_in_float32(tmp_path, run, prompts, transformers_process):
    from tiny_models import build_tiny_model

    path = tmp_path / "bfloat16"
    transformers_process.submit(build_tiny_model, "qwen3", path, torch.bfloat16).result()

    def capture(**options):
        job = transformers_process.submit(capture_all, str(path), prompts, threads=1, **options)
        return job.result()

    native, as_saved = capture()
    matched, in_float32 = capture(precision="matched")
    assert native.fingerprint.engine_dtype == "bfloat16"
    # Widening loses nothing: the values are bfloat16 values.
    assert (as_saved.features.view(np.uint32) & 0xFFFF == 0).all()
    assert (matched.fingerprint.engine_dtype, matched.fingerprint.precision) == (
        "float32",
        "matched",
    )
    assert (in_float32.features.view(np.uint32) & 0xFFFF != 0).any()
    with pytest.raises(InvalidInputError, match="precision 'matched' runs the model in float32"):
        capture(precision="matched", dtype="bfloat16")


def test_what_cannot_be_is_refused_before_the_model_is_loaded(run, prompts):
    refused = {
        "sequences_per_call": (0, InvalidInputError, "'auto' or the most rows"),
        "threads": (0, InvalidInputError, "threads must be at least 1"),
        "dtype": ("int8", InvalidInputError, "dtype is one of"),
        "max_model_len": (MAX_LEN + 1, InvalidInputError, f"rows of up to {MAX_LEN} tokens"),
        "model_args": ({"device_map": "auto"}, NotOfferedError, "may not set device_map"),
    }
    for name, (value, kind, message) in refused.items():
        with pytest.raises(kind, match=message):
            run("qwen3", prompts, **{name: value})


def test_files_that_are_no_model_are_an_error_of_ours(tmp_path, transformers_process, prompts):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(CaptureError, match="Transformers could not load the model") as caught:
        transformers_process.submit(capture_all, str(tmp_path), prompts).result()
    assert caught.value.code == "capture_failed"

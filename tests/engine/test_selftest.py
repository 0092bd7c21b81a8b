"""What the self-test gates, and what is refused before a model is loaded."""

import gc
import weakref

import pytest
from conftest import prompts_of, task_of

from wllm_ray.capture import profiles
from wllm_ray.errors import CaptureError, InvalidInputError, NotOfferedError

pytestmark = pytest.mark.requirement("C-11")

# Nothing could be loaded from here.
NOWHERE = "/nowhere/to-be-found"


@pytest.mark.requirement("D-3")
def test_several_threads_are_not_called_bitwise(open_engine):
    with open_engine("qwen3", threads=2) as started:
        assert started.description.fingerprint.threads == 2
        assert started.description.fingerprint.reproducibility == "tolerance"


@pytest.mark.requirement("C-12")
def test_an_unknown_vllm_is_refused_unless_it_is_allowed(open_engine, monkeypatch):
    monkeypatch.setattr(profiles, "TESTED_VLLM", {"0.1.0": "long ago"})
    with pytest.raises(
        NotOfferedError, match=r"vLLM .* was not tested .* tested: 0\.1\.0"
    ) as error:
        open_engine("qwen3")
    assert error.value.code == "vllm_version_not_offered"
    with open_engine("qwen3", allow_unprofiled_vllm=True) as started:
        assert started.description.selftest.passed


@pytest.mark.requirement("C-12")
def test_an_unprofiled_vllm_needs_the_selftest(open_engine):
    with pytest.raises(InvalidInputError, match="needs the self-test"):
        open_engine("qwen3", allow_unprofiled_vllm=True, selftest=False)


@pytest.mark.requirement("C-1", "C-17")
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"vllm_args": {"tensor_parallel_size": 2}},
        {"vllm_args": {"pipeline_parallel_size": 4}},
        {"vllm_args": {"data_parallel_size": 2}},
    ],
)
def test_parallelism_is_refused(options, open_engine):
    with pytest.raises(NotOfferedError) as error:
        open_engine("qwen3", path=NOWHERE, **options)
    assert error.value.code == "parallelism_not_offered"
    assert "more replicas" in error.value.message


@pytest.mark.requirement("C-17")
@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("enforce_eager", False),
        ("enable_lora", True),
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 2}),
        ("async_scheduling", True),
        ("enable_prefix_caching", True),
        ("enable_chunked_prefill", False),
        ("worker_extension_cls", "other.Extension"),
    ],
)
def test_what_capture_depends_on_cannot_be_passed_through(argument, value, open_engine):
    with pytest.raises(NotOfferedError, match=argument) as error:
        open_engine("qwen3", path=NOWHERE, vllm_args={argument: value})
    assert error.value.code == "feature_not_offered"


@pytest.mark.requirement("C-10")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "matched", "dtype": "bfloat16"}, "runs the model in float32"),
        ({"precision": "exact"}, "'native' or 'matched', found 'exact'"),
    ],
)
def test_a_precision_that_cannot_be_had_is_refused(options, message, open_engine):
    with pytest.raises(InvalidInputError, match=message) as error:
        open_engine("qwen3", path=NOWHERE, **options)
    assert error.value.code == "invalid_argument"


@pytest.mark.parametrize("option", ["prefill_split_tokens", "max_num_seqs", "threads"])
def test_sizes_that_cannot_work_are_refused(option, open_engine):
    with pytest.raises(InvalidInputError, match=option):
        open_engine("qwen3", path=NOWHERE, **{option: 0})


@pytest.mark.requirement("R-5")
def test_closing_frees_the_model_and_refuses_work(open_engine):
    engine = open_engine("qwen3")
    model = weakref.ref(engine._loop.driver._core.model_executor.driver_worker.worker.model_runner)
    engine.close()
    engine.close()
    gc.collect()
    assert model() is None
    with pytest.raises(CaptureError, match="closed") as error:
        engine.check()
    assert error.value.code == "engine_dead"
    with pytest.raises(CaptureError, match="closed"):
        engine.capture(task_of(prompts_of([5])))


def test_a_model_that_cannot_be_loaded_is_one_of_our_errors(open_engine, tiny_model):
    broken = tiny_model("qwen3").parent / "empty"
    broken.mkdir()
    with pytest.raises(CaptureError, match="could not load the model") as error:
        open_engine("qwen3", path=broken)
    assert error.value.code == "capture_failed"
    assert error.value.__cause__ is not None

"""The self-test, and each fault that it exists for, planted."""

import gc
import weakref

import numpy as np
import pytest
from conftest import prompts_of, task_of

from wllm_ray.capture import profiles, topology, vllm_worker
from wllm_ray.capture.hooks import BlockHooks
from wllm_ray.capture.router import Route, RoutedPass, Router
from wllm_ray.errors import CaptureError, InvalidInputError, NotOfferedError

pytestmark = pytest.mark.requirement("C-11")


def plant_branch(monkeypatch):
    first = topology.Residual.FIRST
    monkeypatch.setattr(topology, "_choose", lambda *_: first)


def plant_layer_off_by_one(monkeypatch):
    class Shifted(BlockHooks):
        def __init__(self, blocks, residual, device):
            super().__init__((blocks[0], *blocks[:-1]), residual, device)

    monkeypatch.setattr(vllm_worker, "BlockHooks", Shifted)


def plant_rotated_rows(monkeypatch):
    route = Router.route

    def rotated(self, one_pass):
        routed = route(self, one_pass)
        routes = routed.routes
        rows = [one.rows for one in routes[1:] + routes[:1]]
        moved = tuple(
            Route(one.request_id, np.resize(other, len(one.rows)), one.slots)
            for one, other in zip(routes, rows, strict=True)
        )
        return RoutedPass(moved, routed.mismatched, routed.recaptured)

    monkeypatch.setattr(Router, "route", rotated)


def plant_silent_hook(monkeypatch):
    hook_for = BlockHooks._hook_for

    def silent(self, layer):
        return (lambda *_: None) if layer == 1 else hook_for(self, layer)

    monkeypatch.setattr(BlockHooks, "_hook_for", silent)


def plant_hook_twice(monkeypatch):
    hook_for = BlockHooks._hook_for

    def twice(self, layer):
        hook = hook_for(self, layer)
        return lambda *given: (hook(*given), hook(*given))[0]

    monkeypatch.setattr(BlockHooks, "_hook_for", twice)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (plant_branch, "differ from the engine's own log-probabilities"),
        (plant_layer_off_by_one, "differ from the engine's own log-probabilities"),
        (plant_rotated_rows, "rows are attributed wrongly"),
        (plant_silent_hook, "block 1 fired 0 times in one pass"),
        (plant_hook_twice, "fired 2 times in one pass"),
    ],
)
def test_planted_faults_are_found(plant, message, open_engine, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(CaptureError, match=message) as error:
        open_engine("qwen3")
    assert error.value.code == "self_test_failed"


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
@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("way", ["argument", "vllm_args"])
def test_parallelism_is_refused(option, way, open_engine):
    options = {option: 2} if way == "argument" else {"vllm_args": {option: 2}}
    with pytest.raises(NotOfferedError) as error:
        open_engine("qwen3", **options)
    assert error.value.code == "parallelism_not_offered"


@pytest.mark.requirement("C-17")
@pytest.mark.parametrize(
    "argument", ["enforce_eager", "enable_lora", "speculative_config", "enable_prefix_caching"]
)
def test_what_capture_depends_on_cannot_be_passed_through(argument, open_engine):
    with pytest.raises(NotOfferedError, match=argument):
        open_engine("qwen3", vllm_args={argument: True})


@pytest.mark.parametrize("option", ["prefill_split_tokens", "max_num_seqs", "threads"])
def test_sizes_that_cannot_work_are_refused(option, open_engine):
    with pytest.raises(InvalidInputError, match=option):
        open_engine("qwen3", **{option: 0})


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
        engine.extract(task_of(prompts_of([5])))


def test_a_model_that_cannot_be_loaded_is_one_of_our_errors(open_engine, tiny_model):
    broken = tiny_model("qwen3").parent / "empty"
    broken.mkdir()
    with pytest.raises(CaptureError, match="could not load the model") as error:
        open_engine("qwen3", path=broken)
    assert error.value.code == "capture_failed"
    assert error.value.__cause__ is not None

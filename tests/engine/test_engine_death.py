"""An engine that fails says so at once: to those who wait, to those who come, and to check()."""

import asyncio
import dataclasses
import threading
import time

import pytest
from conftest import prompts_of, task_of, wanted_of
from tiny_models import MAX_LEN

from wllm_ray.capture.admission import Limits
from wllm_ray.capture.vllm_driver import _check_limits
from wllm_ray.errors import CaptureError, InvalidInputError

pytestmark = pytest.mark.requirement("R-5", "C-3")


@pytest.fixture
def fresh(open_engine):
    with open_engine("qwen3", selftest=False) as started:
        yield started


async def test_a_failing_engine_fails_all_work_and_never_spins(fresh, monkeypatch):
    driver = fresh._loop.driver
    steps = []

    def broken():
        steps.append(1)
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(driver, "step", broken)
    work = [fresh.capture_async(task_of(prompts_of([300] * 9), (layer,))) for layer in (0, 1)]
    for result in await asyncio.gather(*work, return_exceptions=True):
        assert isinstance(result, CaptureError)
        assert result.code == "engine_dead"
        assert "RuntimeError" in result.message
        assert "illegal" not in result.message  # foreign text stays in the log
        assert "illegal memory access" in str(result.__cause__)
    assert len(steps) == 1
    with pytest.raises(CaptureError, match="the engine failed"):
        fresh.check()
    with pytest.raises(CaptureError) as error:
        fresh.capture(task_of(prompts_of([5])))
    assert error.value.code == "engine_dead"
    fresh._loop._thread.join(10)
    assert not fresh._loop._thread.is_alive()


def test_a_pass_that_hangs_is_noticed_by_check(fresh, monkeypatch):
    loop = fresh._loop
    release, step = threading.Event(), loop.driver.step

    def slow():
        release.wait(30)
        return step()

    monkeypatch.setattr(loop.driver, "step", slow)
    monkeypatch.setattr(loop, "_progress_limit_s", 0.05)
    job = loop.submit(fresh._chunk([], wanted_of(fresh, "embed"), None))
    job.done.result()
    fresh.check()
    waiting = threading.Thread(target=fresh.capture, args=(task_of(prompts_of([5])),))
    waiting.start()
    while loop._pass_started is None:
        time.sleep(0.001)
    time.sleep(0.1)
    with pytest.raises(CaptureError, match=r"over 0\.05 s"):
        fresh.check()
    release.set()
    waiting.join()


def test_a_scheduler_that_runs_nothing_is_a_dead_engine(fresh, monkeypatch):
    monkeypatch.setattr(fresh._loop.driver._core, "step", lambda: ({}, False))
    with pytest.raises(CaptureError, match="ran no token") as error:
        fresh.capture(task_of(prompts_of([5])))
    assert error.value.code == "engine_dead"


def test_closing_fails_what_is_in_flight(fresh):
    jobs = [fresh._submit(task_of(prompts_of([300] * 30), (0,)))[0] for _ in range(2)]
    fresh.close()
    for job in jobs:
        with pytest.raises(CaptureError, match="closed"):
            job.done.result()


def test_a_split_that_was_not_planned_fails_the_row(fresh, monkeypatch):
    """Where rows are promised to the bit, a scheduler that splits elsewhere breaks the promise."""
    monkeypatch.setattr(fresh._loop, "strict_splits", True)
    driver = fresh._loop.driver
    step = driver.step

    def pretend():
        finished = step()
        driver.capture.ran = dict.fromkeys(driver.capture.ran, (0, 3))
        return finished

    monkeypatch.setattr(driver, "step", pretend)
    chunk = fresh.capture(task_of(prompts_of([5]), (0,)))
    assert chunk.failures[0].code == "engine_failed"
    assert "ran positions 0 to 3" in chunk.failures[0].message


def test_a_request_that_the_engine_forgot_is_a_dead_engine(fresh, monkeypatch):
    driver = fresh._loop.driver
    step = driver.step

    def forget():
        driver._core.abort_requests(list(driver._core.scheduler.requests))
        return step()

    monkeypatch.setattr(driver, "step", forget)
    with pytest.raises(CaptureError, match="ran no token") as error:
        fresh.capture(task_of(prompts_of([5]), (0,)))
    assert error.value.code == "engine_dead"


@pytest.mark.parametrize(
    ("cache_blocks", "can_split", "message"),
    [
        (9, True, "takes 10 blocks of the key-value cache, which has room for 9"),
        (99, False, "cannot be split, and one pass takes 64 tokens; lower max_model_len from 320"),
    ],
)
def test_sizes_with_which_the_longest_prompt_never_runs_are_refused(
    cache_blocks, can_split, message
):
    limits = Limits(64, 64, 8, cache_blocks, lambda tokens: -(-tokens // 32))
    with pytest.raises(InvalidInputError, match=message):
        _check_limits(limits, MAX_LEN, can_split=can_split)
    roomy = dataclasses.replace(limits, cache_blocks=10, split_tokens=MAX_LEN)
    _check_limits(roomy, MAX_LEN, can_split=False)

"""vLLM throws requests out of a key-value cache that is too small, and runs them again.

Admission never lets that happen, so these tests lift its limits on a cache of 14 blocks and make
vLLM run many prompts a little at a time, so that they grow until somebody has to go.
"""

import asyncio
import dataclasses
import threading

import numpy as np
import pytest
from conftest import SPLIT, idle, prompts_of, relative_l2, task_of, wanted_of
from tiny_models import LAYERS

from wllm_ray.capture.coverage import RowsWanted

pytestmark = pytest.mark.requirement("C-2", "C-3")

TIGHT = 1e-4
BLOCK_BYTES = 32 * 2 * LAYERS * 2 * 32 * 4
LENGTHS = [150, 200, 170, 90, 230, 120, 190, 140]
LAYERS_WANTED = (0, 3)


@pytest.fixture(scope="module")
def small(open_engine):
    """A cache that holds one and a half of the longest prompts."""
    with open_engine("qwen3", kv_cache_memory_bytes=14 * BLOCK_BYTES) as started:
        yield started


@pytest.fixture
def crowded(small, monkeypatch):
    """Lifts the limits while a test runs; yields the ids of the requests that were thrown out."""
    loop, scheduler = small._loop, small._loop.driver._core.scheduler
    thrown_out, preempt = [], scheduler._preempt_request

    def note(request, *args, **kwargs):
        thrown_out.append(request.request_id)
        return preempt(request, *args, **kwargs)

    everything = dataclasses.replace(loop._admission._limits, pass_tokens=10**6, cache_blocks=10**6)
    monkeypatch.setattr(loop._admission, "_limits", everything)
    monkeypatch.setattr(scheduler, "_preempt_request", note)
    monkeypatch.setattr(scheduler, "scheduler_reserve_full_isl", False)
    monkeypatch.setattr(scheduler.scheduler_config, "long_prefill_token_threshold", 16)
    return thrown_out


def capture(engine, rows):
    sites = wanted_of(engine, *(f"L{layer}_resid_post" for layer in LAYERS_WANTED))
    chunk = engine._loop.submit(engine._chunk(rows, sites, None)).done.result(60).capture
    chunk.prove()
    return chunk


def wanted(prompts):
    """The first position, one in the middle and the last: all but the last are run again."""
    return [
        RowsWanted(i, ids, np.array([0, len(ids) // 2, len(ids) - 1], dtype=np.int64))
        for i, ids in enumerate(prompts)
    ]


def test_what_is_run_again_is_counted_and_the_first_capture_stands(
    small, crowded, reference, monkeypatch
):
    monkeypatch.setattr(small._loop, "strict_splits", False)
    prompts = prompts_of(LENGTHS, seed=21)
    rows = wanted(prompts)
    chunk = capture(small, rows)
    assert len(set(crowded)) >= 2
    assert chunk.recaptured > 0
    assert [row.failure for row in chunk.rows] == [None] * len(prompts)
    assert (chunk.counts == 1).all()
    model = reference("qwen3")
    expected = np.concatenate(
        [model.rows_at(row.token_ids, row.positions)[:, LAYERS_WANTED] for row in rows]
    )
    assert relative_l2(chunk.features.reshape(expected.shape), expected).max() <= TIGHT
    assert idle(small)


@pytest.mark.requirement("D-3")
def test_a_row_promised_to_the_bit_is_that_row_or_fails_for_now(small, crowded, monkeypatch):
    prompts = prompts_of(LENGTHS, seed=22)
    rough = small.capture(task_of(prompts, LAYERS_WANTED))
    assert crowded
    assert rough.failures
    assert {f.code for f in rough.failures.values()} == {"engine_failed"}
    assert not any(f.permanent for f in rough.failures.values())
    assert idle(small)
    monkeypatch.undo()
    right = small.capture(task_of(prompts, LAYERS_WANTED))
    assert right.failures == {}
    assert right.recaptured == 0
    kept = [i for i in range(len(prompts)) if i not in rough.failures]
    assert np.array_equal(rough.features, right.features[kept])
    again = small.capture(task_of(prompts[::-1], LAYERS_WANTED))
    assert np.array_equal(again.features[::-1], right.features)


@pytest.mark.requirement("R-7")
async def test_a_prompt_that_is_cancelled_between_its_prefill_chunks_leaves_nothing(
    small, monkeypatch
):
    driver = small._loop.driver
    step, first, go_on = driver.step, threading.Event(), threading.Event()

    def pause():
        finished = step()
        first.set()
        go_on.wait(30)
        return finished

    before = small.capture(task_of(prompts_of([30]), (1,))).features
    monkeypatch.setattr(driver, "step", pause)
    running = asyncio.create_task(small.capture_async(task_of(prompts_of([4 * SPLIT]), (0,))))
    assert await asyncio.to_thread(first.wait, 30)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    monkeypatch.undo()
    go_on.set()
    assert await asyncio.to_thread(idle, small)
    assert np.array_equal(small.capture(task_of(prompts_of([30]), (1,))).features, before)


def test_a_request_that_ends_without_its_rows_fails(small, monkeypatch):
    driver = small._loop.driver
    add = driver.add

    def add_and_forget(request_id, *args, **kwargs):
        add(request_id, *args, **kwargs)
        driver.capture.router.release(request_id)

    monkeypatch.setattr(driver, "add", add_and_forget)
    chunk = small.capture(task_of(prompts_of([9]), (0,)))
    assert chunk.failures[0].code == "position_missing"
    assert not chunk.failures[0].permanent

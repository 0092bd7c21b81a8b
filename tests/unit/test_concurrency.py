"""A loop in a thread of its own, and many calls of which one fails."""

import asyncio
import threading
import time

import pytest

from wllm_ray.concurrency import LoopThread, gather


async def name_of_thread():
    return threading.current_thread().name


def test_work_is_waited_for_on_the_loops_own_thread_even_from_a_running_loop():
    thread = LoopThread("a-loop")

    async def as_in_a_notebook():
        return thread.run(name_of_thread())

    try:
        assert thread.run(name_of_thread()) == "a-loop"
        assert asyncio.run(as_in_a_notebook()) == "a-loop"
    finally:
        thread.stop()
    assert not thread.is_running


def test_stopping_cancels_what_runs_and_waits_for_its_threads():
    thread = LoopThread("a-loop")
    done = []

    async def work():
        asyncio.get_running_loop().run_in_executor(None, slow)
        try:
            await asyncio.sleep(30)
        finally:
            done.append("cancelled")

    def slow():
        time.sleep(0.2)
        done.append("thread")

    async def begin():
        task = asyncio.get_running_loop().create_task(work())
        await asyncio.sleep(0)
        return task

    task = thread.run(begin())
    thread.stop()
    assert done == ["cancelled", "thread"]
    assert task.cancelled()
    thread.cancel(task)  # nothing is left to do, and nothing is raised


async def test_when_one_call_raises_the_others_are_cancelled_and_awaited():
    ended = []

    async def slow():
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    async def fails():
        await asyncio.sleep(0)
        raise ValueError("alone")

    with pytest.raises(ValueError, match="alone"):
        await gather([slow(), fails(), slow()])
    assert ended == [True, True]


async def test_results_come_in_the_order_of_the_calls():
    async def after(seconds):
        await asyncio.sleep(seconds)
        return seconds

    assert await gather(after(one) for one in (0.02, 0.0, 0.01)) == [0.02, 0.0, 0.01]

"""Plain asyncio for code that has no event loop, and for many calls at once."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

__all__ = ["LoopThread", "gather"]

Result = TypeVar("Result")


class LoopThread:
    """An event loop in a thread of its own, which also works where the caller has a running one.

    Args:
        name: The thread's name.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether :meth:`stop` was not called yet."""
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait for the work; an interrupted wait cancels it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task of this loop, from any thread, without waiting for its end."""
        if self.is_running:
            self._loop.call_soon_threadsafe(task.cancel)

    def stop(self) -> None:
        """Cancel what still runs, wait for it and for its threads, and end this one."""
        self.run(_wind_up())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _wind_up() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_default_executor()


async def gather(calls: Iterable[Awaitable[Result]]) -> list[Result]:
    """Run all; when one raises, cancel and await the others, then raise it alone."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

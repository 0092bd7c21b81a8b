"""One thread that owns a model: what is asked of it is done one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from traceback import clear_frames
from typing import TypeVar

from wllm_ray.errors import CaptureError

__all__ = ["ModelThread"]

T = TypeVar("T")


class ModelThread:
    """Runs functions on a thread of its own, from any thread or event loop.

    Args:
        name: The thread's name.

    Attributes:
        closing: Set once :meth:`close` was called.
    """

    def __init__(self, name: str) -> None:
        self.closing = threading.Event()
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Queue a function.

        Raises:
            CaptureError: The thread has ended (``engine_dead``).
        """
        try:
            return self._executor.submit(_letting_go, work)
        except RuntimeError as error:
            raise CaptureError("the engine is closed", code="engine_dead") from error

    def check(self) -> None:
        """Raise ``CaptureError`` (``engine_dead``) once the thread is closing."""
        if self.closing.is_set():
            raise CaptureError("the engine is closed", code="engine_dead")

    def close(self) -> None:
        """Wait for what was queued, which is to look at :meth:`check`, and end the thread."""
        self.closing.set()
        self._executor.shutdown()


def _letting_go(work: Callable[[], T]) -> T:
    """Do the work; whoever keeps its error does not keep tensors and buffers with it."""
    try:
        return work()
    except BaseException as error:
        for one in (error, error.__cause__):
            clear_frames(None if one is None else one.__traceback__)
        raise

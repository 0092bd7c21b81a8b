"""The thread on which an engine in this process talks to its low-level engine."""

from __future__ import annotations

from collections.abc import Coroutine
from concurrent.futures import CancelledError
from typing import Any, TypeVar

from wllm_ray.concurrency import LoopThread
from wllm_ray.errors import CaptureError

__all__ = ["EngineThread"]

Result = TypeVar("Result")


class EngineThread(LoopThread):
    """The event loop of one engine."""

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Wait for the work.

        Raises:
            CaptureError: The engine is closed, or is closed meanwhile (``engine_dead``).
        """
        try:
            if self.is_running:
                return super().run(work)
        except CancelledError:
            pass
        work.close()
        raise CaptureError("the engine is closed; open another one", code="engine_dead")

"""What every engine offers to a replica, a coordinator or a notebook."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol, Self, runtime_checkable

from wllm_ray.records import CapturedChunk, CaptureTask, EngineDescription

__all__ = ["Engine"]


@runtime_checkable
class Engine(Protocol):
    """Runs a model and returns chosen activations of chosen rows.

    What is wrong with one row is a failure inside the :class:`~wllm_ray.records.CapturedChunk`;
    an exception is about the whole task.
    """

    @property
    def description(self) -> EngineDescription:
        """What this engine is: model, versions, fingerprint, self-test."""
        ...

    async def capture_async(self, task: CaptureTask) -> CapturedChunk:
        """Capture a chunk; cancelling the awaiting task frees its buffers.

        Raises:
            InvalidInputError: A layer that the model does not have, a position that cannot be
                read, or no sites.
            NotOfferedError: A site or a position that this engine does not capture.
            CaptureError: The engine failed (``engine_dead``) while it ran the chunk.
        """
        ...

    def capture(self, task: CaptureTask) -> CapturedChunk:
        """Capture a chunk and wait for it; as :meth:`capture_async`."""
        ...

    def check(self) -> None:
        """Return within microseconds while the engine is alive and makes progress.

        Raises:
            CaptureError: The engine is dead, closed or stuck (code ``engine_dead``).
        """
        ...

    def close(self) -> None:
        """Stop the engine and free what it holds; work in flight fails."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

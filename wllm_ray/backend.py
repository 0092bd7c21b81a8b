"""What runs the work of requests and jobs: a Ray application, or an engine in this process."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from wllm_ray.dataset.format.manifest import DatasetSpec, Manifest
from wllm_ray.dataset.writing.writer import StageResult
from wllm_ray.plan import Shard
from wllm_ray.records import CapturedChunk, CaptureTask, Chunk
from wllm_ray.requests import Selection, capture_task

__all__ = ["Backend", "capturer"]

Payload = TypeVar("Payload")


class Backend(Protocol[Payload]):
    """Captures chunks, stages shards and commits."""

    async def capture(self, task: CaptureTask, *, alone: bool) -> Payload:
        """Run a chunk, on a replica that runs nothing else meanwhile where ``alone`` says so.

        Raises:
            UnavailableError: Another attempt may succeed; ``engine_died_alone`` where the engine
                died while it ran the chunk alone.
        """

    async def fetch(self, payload: Payload) -> CapturedChunk:
        """Bring what was captured into this process."""

    async def stage(
        self, spec: DatasetSpec, shard: Shard, payloads: Sequence[Payload]
    ) -> StageResult:
        """Write one shard and its receipt."""

    async def commit(self, dataset_id: str) -> Manifest:
        """Create the manifest."""


def capturer(
    backend: Backend[Payload], selection: Selection
) -> Callable[[Chunk, bool], Awaitable[Payload]]:
    """What captures a job's chunks on a backend."""

    async def capture(chunk: Chunk, alone: bool) -> Payload:  # noqa: FBT001 (a callback)
        return await backend.capture(capture_task(selection, chunk.rows), alone=alone)

    return capture

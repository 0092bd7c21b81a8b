"""One request, from rows to inline features or a committed dataset.

The same for HTTP and handles: ``parse_rows → tokenize_rows → plan_chunks → capture →
stage_shard → commit_manifest``. What runs a chunk, stages a shard and commits is a
:class:`Backend`, so this module knows neither Ray nor an engine.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from wllm_ray.answers import dataset_answer, inline_answer, rows_failed
from wllm_ray.coordinator import Coordinator, FlowLimits, Staged
from wllm_ray.dataset.manifest import DatasetSpec, Manifest
from wllm_ray.dataset.reader import load_dataset
from wllm_ray.dataset.spec import build_spec
from wllm_ray.dataset.store import Store
from wllm_ray.dataset.writer import create_spec, staged_shards
from wllm_ray.errors import ConflictError, StorageError, TooLargeError, UnavailableError
from wllm_ray.plan import Shard, ShardLimits, plan_shards
from wllm_ray.records import (
    CapturedChunk,
    CaptureTask,
    Chunk,
    EngineDescription,
    RowFailure,
    RowRecord,
)
from wllm_ray.requests import Prepared, capture_task, prepare
from wllm_ray.rows import Tokenizer
from wllm_ray.schema import ActivationRequest, ActivationResponse
from wllm_ray.wire import Inline

__all__ = ["Backend", "ExtractionLimits", "ExtractionService"]

Payload = TypeVar("Payload")

FLOAT32_BYTES = 4


class Backend(Protocol[Payload]):
    """What runs the work: a Ray application, or an engine in this process."""

    async def capture(self, task: CaptureTask, *, alone: bool) -> Payload:
        """Run a chunk, on a replica that runs nothing else meanwhile where ``alone`` says so.

        Raises:
            UnavailableError: Another attempt may succeed; ``engine_died_alone`` where the engine
                died while it ran the chunk alone.
        """

    async def fetch(self, payload: Payload) -> CapturedChunk:
        """Bring what was captured into this process."""

    async def stage(self, spec: DatasetSpec, shard: Shard, payloads: Sequence[Payload]) -> Staged:
        """Write one shard and its receipt."""

    async def commit(self, dataset_id: str) -> Manifest:
        """Create the manifest."""


@dataclass(frozen=True, slots=True)
class ExtractionLimits:
    """Bounds that the operator sets.

    Attributes:
        max_inline_bytes: Features of one inline answer, as float32.
        shard: Upper bounds of one shard.
        flow: Window, deadlines and retries.
    """

    max_inline_bytes: int = 64 * 1024 * 1024
    shard: ShardLimits = field(default_factory=ShardLimits)
    flow: FlowLimits = field(default_factory=FlowLimits)


class ExtractionService(Generic[Payload]):
    """Answers activation requests for one served model.

    Args:
        backend: Runs the work.
        tokenizer: The served model's tokenizer.
        store: The storage root, or None where only inline results are offered.
        limits: The operator's bounds.

    Attributes:
        description: The engine, once a replica has passed its self-test; set by the owner.
        limits: As given.
    """

    def __init__(
        self,
        backend: Backend[Payload],
        tokenizer: Tokenizer,
        *,
        store: Store | None,
        limits: ExtractionLimits | None = None,
    ) -> None:
        self._backend = backend
        self._tokenizer = tokenizer
        self._store = store
        self.limits = limits or ExtractionLimits()
        self._jobs: dict[str, tuple[DatasetSpec, asyncio.Task[Manifest]]] = {}
        self.description: EngineDescription | None = None

    @property
    def has_store(self) -> bool:
        """Whether datasets can be persisted here."""
        return self._store is not None

    def require_ready(self) -> EngineDescription:
        """The engine's description.

        Raises:
            UnavailableError: No replica has passed its self-test yet.
        """
        if self.description is None:
            raise UnavailableError(
                "no replica has passed its self-test yet; wait for /readyz", code="not_ready"
            )
        return self.description

    async def extract_inline(self, request: ActivationRequest) -> Inline:
        """Capture and answer with the features themselves.

        Raises:
            InvalidInputError: The request cannot be understood.
            TooLargeError: The answer would be over its bound.
            UnavailableError: Not ready.
        """
        prepared = await self._prepare(request)
        self._check_inline_size(prepared)
        coordinator = Coordinator(self._capturer(prepared), limits=self.limits.flow, isolates=True)
        started = time.perf_counter()
        captured = await coordinator.capture_rows(0, prepared.rows, request.batch_size)
        chunks = [await self._backend.fetch(payload) for payload in captured.payloads]
        prepared.timings["capture_s"] = time.perf_counter() - started
        return await asyncio.to_thread(inline_answer, prepared, chunks, captured.failures)

    async def extract_dataset(self, request: ActivationRequest) -> ActivationResponse:
        """Capture, stage and commit; the work goes on if the caller leaves.

        Raises:
            InvalidInputError: The request cannot be understood.
            ConflictError: The dataset id stands for something else.
            RowsFailedError: Transient failures are left; what was staged stays.
            StorageError: No storage root is configured, or it failed.
        """
        prepared = await self._prepare(request)
        store = self._require_store()
        spec = self._spec(prepared)
        started = time.perf_counter()
        # A caller that leaves must not take the commit with it.
        manifest = await asyncio.shield(self._start(spec, prepared, store))
        prepared.timings["dataset_s"] = time.perf_counter() - started
        failures = await asyncio.to_thread(_failures, store, spec.dataset_id)
        return dataset_answer(prepared, manifest, failures)

    def _require_store(self) -> Store:
        if self._store is None:
            raise StorageError(
                "persistence `dataset` needs a storage root and this application has none; "
                "set `storage_root` in its arguments, or ask for persistence `none`",
                code="storage_not_configured",
            )
        return self._store

    async def _prepare(self, request: ActivationRequest) -> Prepared:
        description = self.require_ready()
        return await asyncio.to_thread(prepare, request, description, self._tokenizer)

    def _check_inline_size(self, prepared: Prepared) -> None:
        row_bytes = len(prepared.sites) * prepared.description.hidden_size * FLOAT32_BYTES
        total = row_bytes * len(prepared.rows)
        bound = self.limits.max_inline_bytes
        if total > bound:
            raise TooLargeError(
                f"the inline result would be {total} bytes and the bound is {bound}; send at most "
                f"{bound // row_bytes} rows a request, fewer sites, or persistence `dataset`",
                stage="plan_chunks",
                details={"bytes": total, "max_inline_bytes": bound},
            )

    def _spec(self, prepared: Prepared) -> DatasetSpec:
        limits = self.limits.shard
        if prepared.request.rows_per_shard is not None:
            limits = replace(limits, max_rows=prepared.request.rows_per_shard)
        return build_spec(
            prepared.description,
            prepared.identity,
            (row.request_digest for row in prepared.rows),
            dataset_id=prepared.request.dataset_id,
            limits=limits,
        )

    def _capturer(self, prepared: Prepared) -> Callable[[Chunk, bool], Awaitable[Payload]]:
        async def capture(chunk: Chunk, alone: bool) -> Payload:  # noqa: FBT001 (a callback)
            task = capture_task(prepared.sites, prepared.position, chunk.rows)
            return await self._backend.capture(task, alone=alone)

        return capture

    def _start(self, spec: DatasetSpec, prepared: Prepared, store: Store) -> asyncio.Task[Manifest]:
        """Start the job, or attach to the one that runs for the same dataset already."""
        running = self._jobs.get(spec.dataset_id)
        if running is not None:
            if running[0] != spec:
                raise ConflictError(
                    f"dataset {spec.dataset_id!r} is being written with another request; "
                    "wait for it, or choose another dataset_id"
                )
            return running[1]
        # Without a context of its own, the task would be cancelled with the request.
        task = asyncio.get_running_loop().create_task(
            self._run(spec, prepared, store), context=contextvars.Context()
        )
        self._jobs[spec.dataset_id] = (spec, task)
        task.add_done_callback(lambda done: self._finish(spec.dataset_id, done))
        return task

    def _finish(self, dataset_id: str, task: asyncio.Task[Manifest]) -> None:
        del self._jobs[dataset_id]
        if not task.cancelled():
            task.exception()  # marks it as seen where nobody waits any more

    async def _run(self, spec: DatasetSpec, prepared: Prepared, store: Store) -> Manifest:
        await asyncio.to_thread(create_spec, store, spec, rows_of=_rows_of(spec, prepared))
        done = await asyncio.to_thread(staged_shards, store, spec)
        shards = plan_shards(prepared.rows, spec.shards[0].rows)
        missing = (shard for shard in shards if shard.index not in done)

        async def stage(shard: Shard, payloads: Sequence[Payload]) -> Staged:
            return await self._backend.stage(spec, shard, payloads)

        coordinator = Coordinator(
            self._capturer(prepared), stage, limits=self.limits.flow, isolates=True
        )
        report = await coordinator.run(missing, prepared.request.batch_size)
        if report.transient:
            raise rows_failed(prepared.rows, report.transient)
        return await self._backend.commit(spec.dataset_id)


def _rows_of(spec: DatasetSpec, prepared: Prepared) -> Callable[[int], Sequence[RowRecord]]:
    """The rows of a shard, so that a conflict can name those that differ."""

    def rows_of(shard: int) -> Sequence[RowRecord]:
        entry = spec.shards[shard]
        return prepared.rows[entry.first_row : entry.first_row + entry.rows]

    return rows_of


def _failures(store: Store, dataset_id: str) -> dict[int, RowFailure]:
    dataset = load_dataset(store, dataset_id, verify="off")
    return {
        failed.index: RowFailure(**failed.model_dump(exclude={"index"}))
        for failed in dataset.failures.values()
    }

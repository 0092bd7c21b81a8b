"""Runs a plan: dispatch, a bounded window, deadlines, retries, and staging in any order.

Plain asyncio. What captures a chunk and what stages a shard are callables: a deployment passes
ones that call a replica and a Ray task, the command line passes ones that call HTTP and a thread,
tests pass functions. What ``capture`` returns is opaque here, so that a reference into an object
store can travel to ``stage`` without its bytes passing through this process.

Flow control is two bounds. ``chunks_in_flight`` keeps replicas busy; ``shards_in_flight`` bounds
what is captured but not yet written, so a slow storage root slows capture down instead of filling
the memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, Protocol, TypeVar

from wllm_ray.concurrency import gather
from wllm_ray.errors import UnavailableError
from wllm_ray.isolation import Captured, ChunkRunner
from wllm_ray.plan import Shard, chunk_tokens, plan_chunks
from wllm_ray.records import Chunk, RowFailure, RowRecord

__all__ = ["Captured", "Coordinator", "FlowLimits", "JobReport", "Staged"]

Payload = TypeVar("Payload")


class Staged(Protocol):
    """What a stage callable answers: nothing left to retry means that the shard is written."""

    @property
    def transient(self) -> Mapping[int, RowFailure]:
        """Row index → failure that may pass; not empty means that nothing was written."""

    @property
    def superseded(self) -> bool:
        """Another attempt had written the shard, with other numbers; that one counts."""


@dataclass(frozen=True, slots=True)
class FlowLimits:
    """Bounds of one job.

    Attributes:
        chunks_in_flight: Chunks that are captured at once.
        shards_in_flight: Shards that are captured or staged at once; bounds the memory.
        chunk_deadline_s: Seconds for one attempt at a chunk, waiting for a replica included.
        attempts: How often a chunk is sent while its replica dies or is not there.
        row_attempts: How often rows with transient failures are captured.
        longest_backoff_s: Upper bound of the random wait between attempts.
    """

    chunks_in_flight: int = 8
    shards_in_flight: int = 3
    chunk_deadline_s: float = 600.0
    attempts: int = 4
    row_attempts: int = 3
    longest_backoff_s: float = 10.0


@dataclass(slots=True)
class JobReport:
    """What a run left behind.

    Attributes:
        staged: Indices of the shards that this run captured and that are written.
        superseded: Those of them that another attempt had written first, with other numbers.
        transient: Row index → failure that may pass; their shards are not written.
    """

    staged: list[int] = field(default_factory=list)
    superseded: list[int] = field(default_factory=list)
    transient: dict[int, RowFailure] = field(default_factory=dict)


class Coordinator(Generic[Payload]):
    """Captures chunks and stages shards within :class:`FlowLimits`.

    Args:
        capture: Runs one chunk on some replica. Raises :class:`UnavailableError` where another
            attempt may succeed; any other error ends the job, and so does ``server_unreachable``
            once its attempts are used up.
        stage: Writes one shard from what was captured for it.
        limits: The bounds.
        isolates: Whether ``capture`` can run a chunk alone on a replica, see
            :mod:`wllm_ray.isolation`.
        on_chunk: Called with each chunk once it is captured; again where rows are retried.
    """

    def __init__(
        self,
        capture: Callable[[Chunk, bool], Awaitable[Payload]],
        stage: Callable[[Shard, Sequence[Payload]], Awaitable[Staged]] | None = None,
        *,
        limits: FlowLimits | None = None,
        isolates: bool = False,
        on_chunk: Callable[[Chunk], None] | None = None,
    ) -> None:
        self._stage = stage
        self._limits = limits or FlowLimits()
        self._runner = ChunkRunner(capture, self._limits, isolates=isolates)
        self._on_chunk = on_chunk or (lambda _chunk: None)
        self._chunk_slots = asyncio.Semaphore(self._limits.chunks_in_flight)
        self._shard_slots = asyncio.Semaphore(self._limits.shards_in_flight)

    async def capture_rows(
        self,
        shard: int,
        rows: Sequence[RowRecord],
        batch_size: int | Literal["auto"] = "auto",
    ) -> Captured[Payload]:
        """Capture the rows that have not failed already, the longest chunk first.

        A long chunk that is begun last would keep one replica busy while the others wait. What
        comes back is in row order.

        Args:
            shard: The shard that they belong to.
            rows: Rows of that shard, ascending.
            batch_size: Rows per chunk, or ``auto``.

        Raises:
            WLLMError: A failure that another attempt would not mend.
        """
        runnable = [row for row in rows if row.failure is None]
        lanes = self._limits.chunks_in_flight
        chunks = plan_chunks(shard, runnable, batch_size, lanes=lanes)
        # The window admits them in the order of these calls.
        longest_first = sorted(chunks, key=chunk_tokens, reverse=True)
        parts = await gather([self._capture_chunk(chunk) for chunk in longest_first])
        by_row = sorted(zip(longest_first, parts, strict=True), key=lambda pair: pair[0].first_row)
        captured: Captured[Payload] = Captured()
        for _, part in by_row:
            captured.add(part)
        return captured

    async def run(
        self,
        shards: Iterable[Shard],
        batch_size: int | Literal["auto"] = "auto",
        report: JobReport | None = None,
    ) -> JobReport:
        """Capture and stage shards, pulled from the iterable only when there is room for one.

        Args:
            shards: What is to be done.
            batch_size: Rows per chunk, or ``auto``.
            report: Filled while the run goes on, for who wants to know also where it fails.

        Raises:
            WLLMError: A failure that another attempt would not mend. Shards staged by then stay.
        """
        report = JobReport() if report is None else report
        source = iter(shards)
        try:
            async with asyncio.TaskGroup() as group:
                while shard := await self._next_shard(source):
                    group.create_task(self._run_shard(shard, batch_size, report))
        except BaseExceptionGroup as errors:
            first = _first(errors)
            raise first from first.__cause__
        return report

    async def _next_shard(self, source: Iterator[Shard]) -> Shard | None:
        """Wait for room, then read the next shard without blocking the event loop."""
        await self._shard_slots.acquire()
        return await asyncio.to_thread(lambda: next(source, None))

    async def _run_shard(
        self, shard: Shard, batch_size: int | Literal["auto"], report: JobReport
    ) -> None:
        try:
            transient = await self._capture_and_stage(shard, batch_size, report)
            report.transient |= transient
            if not transient:
                report.staged.append(shard.index)
        finally:
            self._shard_slots.release()

    async def _capture_and_stage(
        self, shard: Shard, batch_size: int | Literal["auto"], report: JobReport
    ) -> dict[int, RowFailure]:
        """Write one shard, capturing rows again whose failure may pass; return what is left."""
        wanted: Sequence[RowRecord] = shard.rows
        payloads: list[Payload] = []
        condemned: dict[int, RowFailure] = {}
        for _ in range(self._limits.row_attempts):
            captured = await self.capture_rows(shard.index, wanted, batch_size)
            payloads += captured.payloads
            condemned |= {i: f for i, f in captured.failures.items() if f.permanent}
            transient = {i: f for i, f in captured.failures.items() if not f.permanent}
            if not transient:
                whole = _condemn(shard, condemned)
                transient = await self._try_to_stage(whole, payloads, report)
            if not transient:
                return {}
            wanted = [row for row in shard.rows if row.index in transient]
        return transient

    async def _try_to_stage(
        self, shard: Shard, payloads: list[Payload], report: JobReport
    ) -> dict[int, RowFailure]:
        """Stage; where what was captured is lost by then, forget it and want every row again."""
        assert self._stage is not None, "a coordinator without `stage` only captures"
        try:
            result = await self._stage(shard, payloads)
        except UnavailableError as error:
            if error.code != "replica_lost":
                raise
            payloads.clear()
            lost = RowFailure.of("replica_lost", error.message)
            return {row.index: lost for row in shard.rows if row.failure is None}
        if result.superseded:
            report.superseded.append(shard.index)
        return dict(result.transient)

    async def _capture_chunk(self, chunk: Chunk) -> Captured[Payload]:
        async with self._chunk_slots:
            captured = await self._runner.run(chunk)
        if captured.payloads:
            self._on_chunk(chunk)
        return captured


def _condemn(shard: Shard, failures: Mapping[int, RowFailure]) -> Shard:
    """The shard with permanent failures that were found while capturing."""
    if not failures:
        return shard
    rows = (row._replace(failure=failures.get(row.index, row.failure)) for row in shard.rows)
    return replace(shard, rows=tuple(rows))


def _first(errors: BaseException) -> BaseException:
    """The first leaf of a group: later ones are mostly its consequences."""
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors

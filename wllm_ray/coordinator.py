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
from dataclasses import dataclass, field
from typing import Generic, Literal, Protocol, TypeVar

from tenacity import AsyncRetrying, retry_if_exception_type, stop_after_attempt
from tenacity.wait import wait_random_exponential

from wllm_ray.errors import UnavailableError
from wllm_ray.plan import Shard, plan_chunks
from wllm_ray.records import Chunk, RowFailure, RowRecord

__all__ = ["Captured", "Coordinator", "FlowLimits", "JobReport", "Staged"]

Payload = TypeVar("Payload")
Result = TypeVar("Result")


class Staged(Protocol):
    """What a stage callable answers: nothing left to retry means that the shard is written."""

    @property
    def transient(self) -> Mapping[int, RowFailure]:
        """Row index → failure that may pass; not empty means that nothing was written."""


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
class Captured(Generic[Payload]):
    """What came back for a set of rows.

    Attributes:
        payloads: One per chunk that was captured, in row order.
        failures: Row index → transient failure, for chunks that no replica could finish.
    """

    payloads: list[Payload] = field(default_factory=list)
    failures: dict[int, RowFailure] = field(default_factory=dict)


@dataclass(slots=True)
class JobReport:
    """What a run left behind.

    Attributes:
        staged: Indices of the shards that this run wrote.
        transient: Row index → failure that may pass; their shards are not written.
    """

    staged: list[int] = field(default_factory=list)
    transient: dict[int, RowFailure] = field(default_factory=dict)


class Coordinator(Generic[Payload]):
    """Captures chunks and stages shards within :class:`FlowLimits`.

    Args:
        capture: Runs one chunk on some replica. Raises :class:`UnavailableError` where another
            attempt may succeed; any other error ends the job, and so does ``server_unreachable``
            once its attempts are used up.
        stage: Writes one shard from what was captured for it.
        limits: The bounds.
        on_chunk: Called with each chunk once it is captured; again where rows are retried.
    """

    def __init__(
        self,
        capture: Callable[[Chunk], Awaitable[Payload]],
        stage: Callable[[Shard, Sequence[Payload]], Awaitable[Staged]] | None = None,
        *,
        limits: FlowLimits | None = None,
        on_chunk: Callable[[Chunk], None] | None = None,
    ) -> None:
        self._capture = capture
        self._stage = stage
        self._limits = limits or FlowLimits()
        self._on_chunk = on_chunk or (lambda _chunk: None)
        self._chunk_slots = asyncio.Semaphore(self._limits.chunks_in_flight)
        self._shard_slots = asyncio.Semaphore(self._limits.shards_in_flight)

    async def capture_rows(
        self,
        shard: int,
        rows: Sequence[RowRecord],
        batch_size: int | Literal["auto"] = "auto",
    ) -> Captured[Payload]:
        """Capture the rows that have not failed already, chunk by chunk, in any order.

        Args:
            shard: The shard that they belong to.
            rows: Rows of that shard, ascending.
            batch_size: Rows per chunk, or ``auto``.

        Raises:
            WLLMError: A failure that another attempt would not mend.
        """
        runnable = [row for row in rows if row.failure is None]
        chunks = plan_chunks(shard, runnable, batch_size)
        captured: Captured[Payload] = Captured()
        for part in await _gather([self._capture_chunk(chunk) for chunk in chunks]):
            captured.payloads += part.payloads
            captured.failures |= part.failures
        return captured

    async def run(
        self, shards: Iterable[Shard], batch_size: int | Literal["auto"] = "auto"
    ) -> JobReport:
        """Capture and stage shards, pulled from the iterable only when there is room for one.

        Raises:
            WLLMError: A failure that another attempt would not mend. Shards staged by then stay.
        """
        report = JobReport()
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
        assert self._stage is not None, "a coordinator without `stage` only captures"
        try:
            captured = await self.capture_rows(shard.index, shard.rows, batch_size)
            payloads, transient = captured.payloads, captured.failures
            for attempt in range(1, self._limits.row_attempts + 1):
                if not transient:
                    transient = dict((await self._stage(shard, payloads)).transient)
                if not transient or attempt == self._limits.row_attempts:
                    break
                again = await self.capture_rows(shard.index, _pick(shard, transient), batch_size)
                payloads, transient = payloads + again.payloads, again.failures
            report.transient |= transient
            if not transient:
                report.staged.append(shard.index)
        finally:
            self._shard_slots.release()

    async def _capture_chunk(self, chunk: Chunk) -> Captured[Payload]:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(UnavailableError),
            stop=stop_after_attempt(self._limits.attempts),
            wait=wait_random_exponential(multiplier=0.5, max=self._limits.longest_backoff_s),
            reraise=True,
        )
        async with self._chunk_slots:
            try:
                payload: Payload = await retrying(self._attempt, chunk)
            except UnavailableError as error:
                if error.code == "server_unreachable":
                    raise  # no other chunk would fare better
                failure = _as_row_failure(error)
                return Captured(failures={row.index: failure for row in chunk.rows})
        self._on_chunk(chunk)
        return Captured(payloads=[payload])

    async def _attempt(self, chunk: Chunk) -> Payload:
        try:
            async with asyncio.timeout(self._limits.chunk_deadline_s) as deadline:
                return await self._capture(chunk)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise UnavailableError(
                f"a chunk of {len(chunk.rows)} rows from row {chunk.first_row} did not finish "
                f"within {self._limits.chunk_deadline_s:g} s",
                code="deadline_exceeded",
                stage="capture",
            ) from None


def _pick(shard: Shard, wanted: Mapping[int, RowFailure]) -> list[RowRecord]:
    return [row for row in shard.rows if row.index in wanted]


def _as_row_failure(error: UnavailableError) -> RowFailure:
    code = "deadline_exceeded" if error.code == "deadline_exceeded" else "replica_lost"
    return RowFailure.of(code, error.message)


def _first(errors: BaseException) -> BaseException:
    """The first leaf of a group: later ones are mostly its consequences."""
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors


async def _gather(calls: Iterable[Awaitable[Result]]) -> list[Result]:
    """Run all; when one raises, cancel and await the others, then raise it alone."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""Captures one chunk whatever happens to replicas, and finds the row that kills them.

A chunk whose replica dies is sent again. One that is lost repeatedly is then sent *alone*: its
replica runs nothing else meanwhile. Only a death during such a run says something about the chunk;
it is then halved until one row is left, and a row is guilty when three engines died with it alone
in flight. Kills from outside meet a row alone only by chance, so they condemn nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from tenacity import AsyncRetrying, retry_if_exception, stop_after_attempt
from tenacity.wait import wait_random_exponential

from wllm_ray.errors import UnavailableError
from wllm_ray.records import Chunk, RowFailure

__all__ = ["Captured", "ChunkRunner", "RetryLimits"]

Payload = TypeVar("Payload")

DEATHS_THAT_CONDEMN = 3


class RetryLimits(Protocol):
    """The bounds that matter here; :class:`wllm_ray.coordinator.FlowLimits` has them."""

    @property
    def chunk_deadline_s(self) -> float:
        """Seconds for one attempt."""

    @property
    def attempts(self) -> int:
        """Attempts together with other chunks, and again as many alone."""

    @property
    def longest_backoff_s(self) -> float:
        """Upper bound of the random wait between attempts."""


@dataclass(slots=True)
class Captured(Generic[Payload]):
    """What came back for a set of rows.

    Attributes:
        payloads: One per chunk that was captured, in row order.
        failures: Row index → failure, for rows that no replica could finish.
    """

    payloads: list[Payload] = field(default_factory=list)
    failures: dict[int, RowFailure] = field(default_factory=dict)

    def add(self, other: Captured[Payload]) -> None:
        """Take in what came back for further rows."""
        self.payloads += other.payloads
        self.failures |= other.failures


def _failed(chunk: Chunk, failure: RowFailure) -> Captured[Payload]:
    return Captured(failures={row.index: failure for row in chunk.rows})


def _as_row_failure(error: UnavailableError) -> RowFailure:
    code = "deadline_exceeded" if error.code == "deadline_exceeded" else "replica_lost"
    return RowFailure.of(code, error.message)


def _may_pass(error: BaseException) -> bool:
    return isinstance(error, UnavailableError) and error.code != "engine_died_alone"


class ChunkRunner(Generic[Payload]):
    """Runs chunks through ``capture`` with deadlines, retries and isolation.

    Args:
        capture: Runs a chunk; ``alone`` asks for a replica that runs nothing else meanwhile.
            Raises :class:`UnavailableError` where another attempt may succeed, with the code
            ``engine_died_alone`` where the engine died while it ran the chunk alone.
        limits: Deadline, attempts and backoff.
        isolates: Whether ``capture`` honours ``alone``.
    """

    def __init__(
        self,
        capture: Callable[[Chunk, bool], Awaitable[Payload]],
        limits: RetryLimits,
        *,
        isolates: bool,
    ) -> None:
        self._capture = capture
        self._limits = limits
        self._isolates = isolates

    async def run(self, chunk: Chunk) -> Captured[Payload]:
        """Capture a chunk, or as much of it as can be.

        Raises:
            UnavailableError: The server is gone (``server_unreachable``), for all chunks alike.
            WLLMError: A failure that another attempt would not mend.
        """
        try:
            return Captured(payloads=[await self._patiently(chunk, alone=False)])
        except UnavailableError as error:
            if error.code == "server_unreachable":
                raise
            if error.code == "replica_lost" and self._isolates:
                return await self._alone(chunk)
            return _failed(chunk, _as_row_failure(error))

    async def _alone(self, chunk: Chunk) -> Captured[Payload]:
        for _ in range(DEATHS_THAT_CONDEMN):
            try:
                return Captured(payloads=[await self._patiently(chunk, alone=True)])
            except UnavailableError as error:
                if _may_pass(error):
                    return _failed(chunk, _as_row_failure(error))
            if len(chunk.rows) > 1:
                return await self._halves(chunk)
        return _failed(
            chunk,
            RowFailure.of(
                "poisonous",
                f"{DEATHS_THAT_CONDEMN} engines died with this row alone in flight",
            ),
        )

    async def _halves(self, chunk: Chunk) -> Captured[Payload]:
        """One after the other: each death costs a replica, and there may be only one."""
        middle = len(chunk.rows) // 2
        captured: Captured[Payload] = Captured()
        for rows in (chunk.rows[:middle], chunk.rows[middle:]):
            captured.add(await self._alone(Chunk(chunk.shard, rows)))
        return captured

    async def _patiently(self, chunk: Chunk, *, alone: bool) -> Payload:
        retrying = AsyncRetrying(
            retry=retry_if_exception(_may_pass),
            stop=stop_after_attempt(self._limits.attempts),
            wait=wait_random_exponential(multiplier=0.5, max=self._limits.longest_backoff_s),
            reraise=True,
        )
        payload: Payload = await retrying(self._attempt, chunk, alone)
        return payload

    async def _attempt(self, chunk: Chunk, alone: bool) -> Payload:  # noqa: FBT001 (passed on)
        try:
            async with asyncio.timeout(self._limits.chunk_deadline_s) as deadline:
                return await self._capture(chunk, alone)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise UnavailableError(
                f"a chunk of {len(chunk.rows)} rows from row {chunk.first_row} did not finish "
                f"within {self._limits.chunk_deadline_s:g} s",
                code="deadline_exceeded",
                stage="capture",
            ) from None

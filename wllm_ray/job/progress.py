"""Who hears how far a job is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from wllm_ray.dataset.format.manifest import DatasetSpec, Receipt
from wllm_ray.records import Chunk

__all__ = ["Progress", "ProgressLines", "RowCount"]


class Progress:
    """Hears how far a job is; this one says nothing."""

    def planned(self, spec: DatasetSpec, receipts: Mapping[int, Receipt]) -> None:
        """The input is checked, and so many of its shards were written before."""

    def captured(self, chunk: Chunk) -> None:
        """A chunk is captured; again where rows are retried."""

    def staged(self, receipt: Receipt) -> None:
        """A shard is written."""


class RowCount(Progress):
    """Counts rows, each once however often it is tried.

    Attributes:
        total: All rows; 0 until the input is checked.
        resumed: Rows that were written before.
        failed: Rows of the written shards that failed for good.
    """

    def __init__(self) -> None:
        self.total = self.resumed = self.failed = 0
        self._sizes: dict[int, int] = {}
        self._done: dict[int, int] = {}

    @property
    def done(self) -> int:
        """Rows that are captured, refused or written."""
        return sum(self._done.values())

    def planned(self, spec: DatasetSpec, receipts: Mapping[int, Receipt]) -> None:
        """Take the total, and what was written before."""
        self.total = spec.rows
        self._sizes = {number: shard.rows for number, shard in enumerate(spec.shards)}
        for receipt in receipts.values():
            self._count(receipt)
        self.resumed = self.done

    def captured(self, chunk: Chunk) -> None:
        """Count a chunk, up to the size of its shard."""
        done = self._done.get(chunk.shard, 0) + len(chunk.rows)
        self._done[chunk.shard] = min(done, self._sizes[chunk.shard])

    def staged(self, receipt: Receipt) -> None:
        """Count a shard as done, rows that were refused included."""
        self._count(receipt)

    def _count(self, receipt: Receipt) -> None:
        self._done[receipt.shard] = receipt.rows
        self.failed += receipt.rows_failed


class ProgressLines(RowCount):
    """Says in one plain line how far a job is, for logs.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock = clock
        self._began = clock()

    def planned(self, spec: DatasetSpec, receipts: Mapping[int, Receipt]) -> None:
        """Take the total, and measure the rate from now on."""
        super().planned(spec, receipts)
        self._began = self._clock()

    def line(self) -> str:
        """For example ``120/1000 rows, 2 failed, 35.1 rows/s, 0:25 left``."""
        if not self.total:
            return "reading the input"
        rate = (self.done - self.resumed) / max(self._clock() - self._began, 1e-9)
        todo = self.total - self.done
        left = _minutes(todo / rate) if rate else "unknown time" if todo else "0:00"
        rows = "row" if self.total == 1 else "rows"
        return (
            f"{self.done}/{self.total} {rows}, {self.failed} failed, {rate:.1f} rows/s, {left} left"
        )


def _minutes(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"

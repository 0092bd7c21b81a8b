"""Which rows share a shard, and which share a chunk: pure and deterministic.

A shard's rows are fixed by row index alone, so the plan does not depend on who runs it or on what
failed. Chunks are only a unit of work: they never cross a shard and leave no trace in a dataset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from wllm_ray.records import Chunk, RowRecord

__all__ = ["Shard", "ShardLimits", "plan_chunks", "plan_shards"]

# A chunk of this many tokens keeps an engine busy for several passes, and is little work to repeat.
AUTO_CHUNK_TOKENS = 8192
AUTO_CHUNK_ROWS = 64


@dataclass(frozen=True, slots=True)
class ShardLimits:
    """Upper bounds of one shard; both are recorded in the dataset's spec."""

    max_rows: int = 4096
    max_bytes: int = 64 * 1024 * 1024

    def rows_per_shard(self, row_bytes: int) -> int:
        """How many rows of ``row_bytes`` feature bytes one shard holds; at least one."""
        return max(1, min(self.max_rows, self.max_bytes // row_bytes))


@dataclass(frozen=True, slots=True)
class Shard:
    """A fixed run of rows: the unit of writing, verifying and resuming."""

    index: int
    rows: tuple[RowRecord, ...]

    @property
    def first_row(self) -> int:
        """Index of the first row."""
        return self.rows[0].index


def plan_shards(rows: Iterable[RowRecord], rows_per_shard: int) -> Iterator[Shard]:
    """Cut a stream of rows into shards, holding one shard in memory at a time."""
    source = iter(rows)
    index = 0
    while batch := tuple(islice(source, rows_per_shard)):
        yield Shard(index, batch)
        index += 1


def _tokens(row: RowRecord) -> int:
    return 0 if row.token_ids is None else len(row.token_ids)


def plan_chunks(
    shard: int, rows: Sequence[RowRecord], batch_size: int | Literal["auto"] = "auto"
) -> tuple[Chunk, ...]:
    """Cut consecutive rows of one shard into chunks.

    Args:
        shard: The shard's index.
        rows: Its rows, or those of them that are still wanted.
        batch_size: Rows per chunk, or ``auto``: bounded by tokens and by rows.
    """
    max_rows = AUTO_CHUNK_ROWS if batch_size == "auto" else batch_size
    chunks: list[Chunk] = []
    batch: list[RowRecord] = []
    tokens = 0
    for row in rows:
        over = batch_size == "auto" and tokens + _tokens(row) > AUTO_CHUNK_TOKENS
        if batch and (over or len(batch) == max_rows):
            chunks.append(Chunk(shard, tuple(batch)))
            batch, tokens = [], 0
        batch.append(row)
        tokens += _tokens(row)
    if batch:
        chunks.append(Chunk(shard, tuple(batch)))
    return tuple(chunks)

"""Which rows share a shard, and which share a chunk: pure and deterministic.

A shard's rows follow from what is asked alone, so the plan does not depend on who runs it or on
what failed. Chunks are only a unit of work: they never cross a shard and leave no trace in a
dataset.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal, TypeVar

from wllm_ray.records import Chunk, RowRecord

__all__ = ["Shard", "ShardLimits", "chunk_tokens", "plan_chunks"]

Item = TypeVar("Item")

# A chunk of this many tokens keeps an engine busy for several passes, and is little work to repeat.
AUTO_CHUNK_TOKENS = 8192
AUTO_CHUNK_ROWS = 64
# Below this, calling one more replica costs more than it saves.
LEAST_TOKENS_PER_LANE = 256


@dataclass(frozen=True, slots=True)
class ShardLimits:
    """Upper bounds of one shard; both are recorded in the dataset's spec."""

    max_rows: int = 4096
    max_bytes: int = 64 * 1024 * 1024

    def cut(self, rows: Iterable[tuple[Item, int]]) -> Iterator[list[Item]]:
        """Group a stream of rows into shards; a row over ``max_bytes`` has one for itself.

        Args:
            rows: What stands for each row, and how many feature bytes it may have.
        """
        shard: list[Item] = []
        total = 0
        for item, size in rows:
            if shard and (len(shard) == self.max_rows or total + size > self.max_bytes):
                yield shard
                shard, total = [], 0
            shard.append(item)
            total += size
        if shard:
            yield shard


@dataclass(frozen=True, slots=True)
class Shard:
    """A fixed run of rows: the unit of writing, verifying and resuming."""

    index: int
    rows: tuple[RowRecord, ...]

    @property
    def first_row(self) -> int:
        """Index of the first row."""
        return self.rows[0].index


def plan_chunks(
    shard: int,
    rows: Sequence[RowRecord],
    batch_size: int | Literal["auto"] = "auto",
    *,
    lanes: int = 1,
) -> tuple[Chunk, ...]:
    """Cut consecutive rows of one shard into chunks.

    Args:
        shard: The shard's index.
        rows: Its rows, or those of them that are still wanted.
        batch_size: Rows per chunk, or ``auto``: bounded by tokens and by rows, and of about equal
            tokens.
        lanes: Chunks that can be run at once. ``auto`` makes at least so many where the rows are
            enough to be worth it, so that no replica waits while another works on a long chunk.
    """
    if batch_size == "auto":
        runs = _even_runs(rows, lanes)
    else:
        runs = (rows[at : at + batch_size] for at in range(0, len(rows), batch_size))
    return tuple(Chunk(shard, tuple(run)) for run in runs)


def chunk_tokens(chunk: Chunk) -> int:
    """How many tokens a chunk has, or may have where another machine tokenises."""
    return sum(map(_tokens, chunk.rows))


def _tokens(row: RowRecord) -> int:
    return row.tokens_bound if row.token_ids is None else len(row.token_ids)


def _even_runs(rows: Sequence[RowRecord], lanes: int) -> Iterator[Sequence[RowRecord]]:
    """Runs of about equal tokens, as few as the bounds and the lanes allow."""
    tokens = [_tokens(row) for row in rows]
    left = sum(tokens)
    runs = max(
        min(lanes, left // LEAST_TOKENS_PER_LANE),
        ceil(left / AUTO_CHUNK_TOKENS),
        ceil(len(rows) / AUTO_CHUNK_ROWS),
    )
    start = 0
    while start < len(rows):
        runs = max(runs, 1)
        share = left / runs
        # Each run after this one needs a row, too.
        last = min(len(rows) - runs + 1, start + AUTO_CHUNK_ROWS)
        stop, total = start + 1, tokens[start]
        while (
            stop < last
            and total + tokens[stop] <= AUTO_CHUNK_TOKENS
            and total + tokens[stop] / 2 <= share  # nearer to the share with it than without
        ):
            total += tokens[stop]
            stop += 1
        yield rows[start:stop]
        start, left, runs = stop, left - total, runs - 1

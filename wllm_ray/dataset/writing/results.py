"""Which result counts for each row of a shard, out of all that engines returned for it.

A captured result beats a transient failure, and so does a permanent one; of transient failures the
latest counts, of permanent ones the first. Two captured results for one row, or a captured result
beside a permanent failure, mean that something else is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from wllm_ray.errors import IntegrityError
from wllm_ray.records import CapturedChunk, RowFailure, RowRecord

__all__ = ["Results", "best_results", "inconsistent"]


@dataclass(frozen=True, slots=True)
class Results:
    """The result of each row, by the row's place in its shard.

    Attributes:
        chunks: [R] int64, the number of the chunk that it is from; -1 where the row had failed
            before it was sent.
        starts: [R] int64, where its features begin in that chunk.
        stops: [R] int64, where they end.
        failures: Place → why, for the rows that have none.
    """

    chunks: NDArray[np.int64]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    failures: dict[int, RowFailure]


@dataclass(frozen=True, slots=True)
class _Found:
    """What all chunks say, entry by entry, in the order of the chunks.

    Attributes:
        places: [E] int64, of which row of the shard.
        chunks: [E] int64, which chunk says so.
        stops: [E] int64, where the row's features end in it.
        lengths: [E] int64, how many there are; 0 where the row failed.
    """

    places: NDArray[np.int64]
    chunks: NDArray[np.int64]
    stops: NDArray[np.int64]
    lengths: NDArray[np.int64]


def best_results(rows: Sequence[RowRecord], chunks: Sequence[CapturedChunk]) -> Results:
    """The result that counts for each row; proves that every row has one.

    Args:
        rows: The rows of the shard, consecutive; those that failed already carry their failure.
        chunks: What engines returned for the others.

    Raises:
        IntegrityError: A row has no result, or more than one that counts, or one that
            contradicts itself (``rows_inconsistent``).
    """
    decided = {place: row.failure for place, row in enumerate(rows) if row.failure is not None}
    found = _found(rows[0].index, chunks)
    _expect_wanted(rows, decided, found)
    is_good = found.lengths > 0
    _expect_reasons(rows, chunks, found, is_good)
    unknown = np.full((3, len(rows)), -1, np.int64)
    results = Results(unknown[0], unknown[1], unknown[2], decided)
    times = np.bincount(found.places[is_good], minlength=len(rows))
    if (twice := np.flatnonzero(times > 1)).size:
        inconsistent(f"row {rows[twice[0]].index} was captured twice; each row has one result")
    captured = found.places[is_good]
    results.chunks[captured] = found.chunks[is_good]
    results.stops[captured] = found.stops[is_good]
    results.starts[captured] = found.stops[is_good] - found.lengths[is_good]
    for entry in np.flatnonzero(~is_good).tolist():
        place, number = int(found.places[entry]), int(found.chunks[entry])
        _add_failure(results, rows[place].index, place, number, chunks[number])
    missing = np.flatnonzero((results.chunks < 0) & ~_mask(len(rows), decided))
    if missing.size:
        listed = [rows[place].index for place in missing[:5]]
        inconsistent(f"rows {listed} ({missing.size} in all) were neither captured nor failed")
    return results


def inconsistent(message: str) -> NoReturn:
    """Refuse a shard whose rows and chunks do not belong together."""
    raise IntegrityError(message, code="rows_inconsistent", stage="stage_shard")


def _found(first_row: int, chunks: Sequence[CapturedChunk]) -> _Found:
    def joined(parts: Iterable[NDArray[Any]]) -> NDArray[np.int64]:
        return np.concatenate([np.empty(0, np.int64), *parts], dtype=np.int64, casting="unsafe")

    sizes = [len(chunk.row_index) for chunk in chunks]
    return _Found(
        places=joined(chunk.row_index for chunk in chunks) - first_row,
        chunks=np.repeat(np.arange(len(chunks)), sizes),
        stops=joined(np.cumsum(chunk.lengths) for chunk in chunks),
        lengths=joined(chunk.lengths for chunk in chunks),
    )


def _expect_wanted(rows: Sequence[RowRecord], decided: dict[int, Any], found: _Found) -> None:
    """Each result is of a row of this shard that was sent."""
    outside = (found.places < 0) | (found.places >= len(rows))
    if outside.any():
        # Added as arrays: what was out of range when it was subtracted comes back as it was.
        index = int((found.places[outside][:1] + rows[0].index)[0])
        inconsistent(f"a chunk holds row {index}, which is not in this shard")
    unwanted = _mask(len(rows), decided)[found.places]
    if unwanted.any():
        index = rows[0].index + int(found.places[unwanted][0])
        inconsistent(f"a chunk holds row {index}, which failed before it was sent")


def _expect_reasons(
    rows: Sequence[RowRecord],
    chunks: Sequence[CapturedChunk],
    found: _Found,
    is_good: NDArray[np.bool_],
) -> None:
    """A row has features, or a reason why it has none, and not both."""
    none = np.empty(0, np.bool_)
    failed = np.concatenate([none, *map(_has_failed, chunks)])
    if (failed != is_good).all():
        return
    entry = int(np.flatnonzero(failed == is_good)[0])
    index, length = rows[int(found.places[entry])].index, found.lengths[entry]
    said = "failed" if failed[entry] else "has no failure"
    inconsistent(f"row {index} {said}, but a chunk holds {length} feature rows of it")


def _has_failed(chunk: CapturedChunk) -> NDArray[np.bool_]:
    if not chunk.failures:
        return np.zeros(len(chunk.row_index), np.bool_)
    return np.isin(chunk.row_index, list(chunk.failures))


def _add_failure(
    results: Results, index: int, place: int, number: int, chunk: CapturedChunk
) -> None:
    """Take in what a chunk says of a row that it has no features of."""
    failure, before = chunk.failures[index], results.failures.get(place)
    if before is None and results.chunks[place] >= 0:
        if failure.permanent:
            inconsistent(f"row {index} was captured and failed for good; each row has one result")
    elif before is None or not before.permanent:
        results.failures[place] = failure
        results.chunks[place] = number


def _mask(count: int, places: dict[int, Any]) -> NDArray[np.bool_]:
    mask = np.zeros(count, np.bool_)
    mask[list(places)] = True
    return mask

"""Byte ranges of objects: what may be asked for, how requests share them, and whole answers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from wllm_ray.errors import InvalidInputError, StorageError

__all__ = ["check_ranges", "covering", "cut", "expect_whole"]

# A request takes as long as this many bytes more: 10 ms at 100 MiB/s.
_GAP_BYTES = 1 << 20


def check_ranges(key: str, ranges: Sequence[tuple[int, int]]) -> None:
    """Refuse ranges that are none.

    Raises:
        InvalidInputError: Code ``invalid_argument``.
    """
    for start, stop in ranges:
        if not 0 <= start <= stop:
            raise InvalidInputError(
                f"{key}: a range runs from 0 or later to a later byte, found {start} to {stop}",
                code="invalid_argument",
            )


def covering(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The ranges to request, sorted and apart, so that neighbours come together."""
    covers: list[tuple[int, int]] = []
    for one in sorted((start, stop) for start, stop in ranges if start < stop):
        if covers and one[0] - covers[-1][1] <= _GAP_BYTES:
            start, stop = covers.pop()
            covers.append((start, max(stop, one[1])))
        else:
            covers.append(one)
    return covers


def cut(
    ranges: Sequence[tuple[int, int]],
    covers: Sequence[tuple[int, int]],
    answers: Sequence[memoryview],
) -> list[memoryview]:
    """What was asked for, out of whole answers to :func:`covering` of it."""
    starts = [start for start, _ in covers]

    def part(start: int, stop: int) -> memoryview:
        if start == stop:
            return memoryview(b"")
        at = bisect_right(starts, start) - 1
        return answers[at][start - starts[at] : stop - starts[at]]

    return [part(start, stop) for start, stop in ranges]


def expect_whole(key: str, uri: str, wanted: int, found: int) -> None:
    """Refuse an answer of another length than was asked for: a reader would take it for data.

    Raises:
        StorageError: Code ``storage_failed``.
    """
    if found != wanted:
        raise StorageError(
            f"could not read {key} under {uri}: expected {wanted} bytes, the answer has {found}; "
            f"the object is shorter than its record, or the answer was cut off. Run again, and "
            f"if this stays, restore the object from a copy"
        )

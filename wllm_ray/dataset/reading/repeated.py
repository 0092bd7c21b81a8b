"""Find row ids that occur twice among millions of rows, keeping eight bytes of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Place", "RowIds"]


class Place(NamedTuple):
    """A row: which of the tables, and which row of it, both counted from 0."""

    table: int
    row: int


class RowIds:
    """The ids of the rows of some tables, as 64-bit hashes.

    Equal hashes are a suspicion only: :meth:`repeated` compares the ids themselves.
    Tables may be added by several threads.
    """

    def __init__(self) -> None:
        self._hashes: dict[int, NDArray[np.int64]] = {}

    def add(self, table: int, ids: Sequence[str]) -> None:
        """Take note of the ids of one table, in row order."""
        self._hashes[table] = np.fromiter(map(hash, ids), np.int64, len(ids))

    def repeated(
        self, ids_of: Callable[[int], Sequence[str]]
    ) -> Iterator[tuple[str, Place, Place]]:
        """Each id that was there before, with its first place and this one, in order.

        Args:
            ids_of: Table → its ids once more; called for tables under suspicion only.
        """
        first: dict[str, Place] = {}
        for table, rows in self._suspects():
            ids = ids_of(table)
            for row in rows:
                here = Place(table, row)
                before = first.setdefault(ids[row], here)
                if before != here:
                    yield ids[row], before, here

    def _suspects(self) -> Iterator[tuple[int, list[int]]]:
        """Table → the rows of it whose hash another row has, too."""
        if not self._hashes:
            return
        ordered = np.sort(np.concatenate(list(self._hashes.values())))
        repeated = ordered[1:][ordered[1:] == ordered[:-1]]
        if not repeated.size:
            return
        for table, hashes in sorted(self._hashes.items()):
            if rows := np.flatnonzero(np.isin(hashes, repeated)).tolist():
                yield table, rows

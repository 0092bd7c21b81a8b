"""Feature rows by their numbers: runs of them, or any in any order, as they are stored."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from wllm_ray.dataset.format.dtypes import numpy_dtype
from wllm_ray.dataset.reading.files import DatasetFiles

__all__ = ["Picker", "pieces"]


def pieces(starts: NDArray[np.int64], start: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Consecutive feature rows, at least one, cut where shards end: (shard, start, stop) each.

    Args:
        starts: [shards + 1] int64, where each shard begins and the last one ends.
        start: The first.
        stop: The one behind the last.
    """
    first = int(starts.searchsorted(start, side="right")) - 1
    last = int(starts.searchsorted(stop, side="left"))
    for shard, (begin, end) in enumerate(pairwise(starts[first : last + 1].tolist()), first):
        if begin < end:
            yield shard, max(begin, start), min(end, stop)


class Picker:
    """Reads feature rows of one site, or of all, out of all shards.

    Args:
        files: The dataset's files.
        site: The site's number, or None for all.

    Raises:
        NotOfferedError: All are asked for, and they differ in width
            (``widths_not_representable``).
    """

    def __init__(self, files: DatasetFiles, site: int | None) -> None:
        self.files = files
        self.site = site
        self.row_shape = files.row_shape(site)

    def __reduce__(self) -> tuple[Any, ...]:
        return Picker, (self.files, self.site)

    def run(self, start: int, stop: int) -> NDArray[Any]:
        """Consecutive feature rows; a read-only view where one file holds them and is whole."""
        parts = []
        for shard, begin, end in pieces(self.files.starts, start, stop):
            first = int(self.files.starts[shard])
            keep = self._sizes[shard] <= self.files.cache.most
            rows = slice(begin - first, end - first)
            parts.append(self.files.stored(shard, self.site, rows, keep=keep))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def pick(self, wanted: NDArray[np.int64], *, sweep: bool = False) -> NDArray[Any]:
        """Feature rows in any order, [B, D] or [B, L, D], copied; only their shards are read.

        Args:
            wanted: [B] int64, numbers among all feature rows.
            sweep: Whether all the others will be wanted, too, so that what is fetched had better
                be kept where it all fits.
        """
        if not len(wanted):
            return np.empty((0, *self.row_shape), numpy_dtype(self.files.manifest.dtype))
        if self.files.stay_in_place:
            parts = [array.pick(wanted) for array in self._mapped]
            if self.files.manifest.shard_layout == "stacked" or self.site is not None:
                return parts[0]
            return np.stack(parts, axis=1)
        return self._fetched(wanted, keep=sweep and sum(self._sizes) <= self.files.cache.most)

    def _fetched(self, wanted: NDArray[np.int64], *, keep: bool) -> NDArray[Any]:
        starts = self.files.starts
        dtype = numpy_dtype(self.files.manifest.dtype)
        result = np.empty((len(wanted), *self.row_shape), dtype)
        shards = starts.searchsorted(wanted, side="right") - 1
        by_shard = np.argsort(shards, kind="stable")
        present, begins = np.unique(shards[by_shard], return_index=True)
        for shard, places in zip(present.tolist(), np.split(by_shard, begins[1:]), strict=True):
            rows = wanted[places] - starts[shard]
            result[places] = self.files.stored(shard, self.site, rows, keep=keep)
        return result

    @cached_property
    def _numbers(self) -> list[int]:
        """Which of the manifest's arrays hold what is read."""
        if self.files.manifest.shard_layout == "stacked":
            return [0]
        return list(range(len(self.files.manifest.sites))) if self.site is None else [self.site]

    @cached_property
    def _sizes(self) -> list[int]:
        """For each shard, the bytes of the files that hold what is read."""
        return [
            sum(shard.features_files[number].bytes for number in self._numbers)
            for shard in self.files.manifest.shards
        ]

    @cached_property
    def _mapped(self) -> list[_MappedRows]:
        column = self.site if self.files.manifest.shard_layout == "stacked" else None
        return [_MappedRows(self.files, number, column) for number in self._numbers]


class _MappedRows:
    """Feature rows of one array, which lies in as many files as there are shards.

    NumPy picks out of one array at a time; picked shard by shard, every row would be copied twice
    to get into order. But all files are in one address space: seen as one array of rows that
    begins at every byte from the lowest row on, they are picked out of at once.

    Args:
        files: The dataset's files, which are local and few enough to be kept all.
        number: Which of the manifest's arrays.
        column: The one place of its first axis that is wanted, or None for all.
    """

    def __init__(self, files: DatasetFiles, number: int, column: int | None) -> None:
        axes = files.manifest.arrays[number].axes
        self._files, self._number = files, number
        self._dtype = numpy_dtype(files.manifest.dtype)
        self._axes = axes if column is None else axes[1:]
        self._stride = math.prod(axes) * self._dtype.itemsize
        self._size = math.prod(self._axes) * self._dtype.itemsize
        self._begin = (column or 0) * self._size
        shards = len(files.manifest.shards)
        self._opening = threading.Lock()
        self._is_open = np.zeros(shards, np.bool_)
        # For each open shard, the address of feature row 0 of the dataset, if all rows lay before
        # and behind the shard's own.
        self._addresses = np.zeros(shards, np.int64)
        # The first row of each open shard, the lowest in memory first of all.
        self._first_rows: list[NDArray[np.void]] = []
        self._end = 0
        self._view = _View(np.empty(0, np.void), self._addresses)

    def pick(self, wanted: NDArray[np.int64]) -> NDArray[Any]:
        shards = self._shards[wanted]
        if not self._is_open.all():
            for shard in np.unique(shards[~self._is_open[shards]]).tolist():
                self._open(shard)
        everywhere, origins = self._view
        places = origins[shards] + wanted * self._stride
        picked: NDArray[Any] = everywhere[places].view(self._dtype)
        return picked.reshape(len(wanted), *self._axes)

    @cached_property
    def _shards(self) -> NDArray[np.int32]:
        """For each feature row, its shard: quicker to look up than to search for."""
        starts = self._files.starts
        return np.repeat(np.arange(len(starts) - 1, dtype=np.int32), np.diff(starts))

    def _open(self, shard: int) -> None:
        data = self._files.array(shard, self._number).reshape(-1).view(np.uint8)
        row = data[self._begin : self._begin + self._size].view(np.dtype((np.void, self._size)))
        address = row.ctypes.data
        with self._opening:
            is_lowest = not self._first_rows or address < self._first_rows[0].ctypes.data
            self._first_rows.insert(0 if is_lowest else len(self._first_rows), row)
            self._addresses[shard] = address - int(self._files.starts[shard]) * self._stride
            self._end = max(self._end, address + data.size - self._stride + 1)
            lowest = self._first_rows[0]
            begin = lowest.ctypes.data
            everywhere = as_strided(lowest, (self._end - begin,), (1,), writeable=False)
            # In this order: another thread may be picking.
            self._view = _View(everywhere, self._addresses - begin)
            self._is_open[shard] = True


class _View(NamedTuple):
    """All open files as one array.

    Attributes:
        everywhere: A row that begins at every byte, from the lowest row on.
        origins: [shards] int64: for each open shard, at which of these feature row 0 would be.
    """

    everywhere: NDArray[np.void]
    origins: NDArray[np.int64]

"""Feature rows by their numbers: runs of them, or any in any order, as they are stored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

from wllm_ray.dataset.format.dtypes import numpy_dtype
from wllm_ray.dataset.reading.files import DatasetFiles
from wllm_ray.lazy import lazy

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
        shards = self.files.shards_of(wanted)
        by_shard = np.argsort(shards, kind="stable")
        present, begins = np.unique(shards[by_shard], return_index=True)
        for shard, places in zip(present.tolist(), np.split(by_shard, begins[1:]), strict=True):
            rows = wanted[places] - starts[shard]
            result[places] = self.files.stored(shard, self.site, rows, keep=keep)
        return result

    @lazy
    def _numbers(self) -> list[int]:
        """Which of the manifest's arrays hold what is read."""
        if self.files.manifest.shard_layout == "stacked":
            return [0]
        return list(range(len(self.files.manifest.sites))) if self.site is None else [self.site]

    @lazy
    def _sizes(self) -> list[int]:
        """For each shard, the bytes of the files that hold what is read."""
        return [
            sum(shard.features_files[number].bytes for number in self._numbers)
            for shard in self.files.manifest.shards
        ]

    @lazy
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
        # For each shard whose file is mapped, its first row, and the address of that; else 0.
        self._first_rows: dict[int, NDArray[np.void]] = {}
        self._addresses = np.zeros(len(files.manifest.shards), np.int64)
        nothing = np.empty(0, np.void)
        self._view = _View(self._addresses > 0, nothing, self._addresses, is_whole=False)

    def pick(self, wanted: NDArray[np.int64]) -> NDArray[Any]:
        shards = self._files.shards_of(wanted)
        view = self._view
        if not view.is_whole and not view.is_open[shards].all():
            # No lock, which a child that is forked might find held: a thread that writes an older
            # view over a newer one makes the next look again, and nothing else.
            view = self._view = self._opened(np.unique(shards).tolist())
        places = view.origins.take(shards) + wanted * self._stride
        picked: NDArray[Any] = view.everywhere[places].view(self._dtype)
        return picked.reshape(len(wanted), *self._axes)

    def _opened(self, shards: list[int]) -> _View:
        """All files that are mapped, among them those of these shards."""
        for shard in shards:
            if not self._addresses[shard]:
                data = self._files.array(shard, self._number).reshape(-1).view(np.uint8)
                first = data[self._begin : self._begin + self._size]
                row = first.view(np.dtype((np.void, self._size)))
                self._addresses[shard] = self._first_rows.setdefault(shard, row).ctypes.data
        starts, addresses = self._files.starts, self._addresses.copy()
        is_open = addresses > 0
        opened = np.flatnonzero(is_open)
        lowest = int(opened[addresses[opened].argmin()])
        begin = int(addresses[lowest])
        last_rows = addresses + (np.diff(starts) - 1) * self._stride
        span = int(last_rows[opened].max()) + 1 - begin
        everywhere = as_strided(self._first_rows[lowest], (span,), (1,), writeable=False)
        origins = addresses - starts[:-1] * self._stride - begin
        return _View(is_open, everywhere, origins, is_whole=bool(is_open.all()))


class _View(NamedTuple):
    """Files that are mapped, as one array.

    Attributes:
        is_open: [shards] bool, whose they are.
        everywhere: A row that begins at every byte, from the lowest row in memory on.
        origins: [shards] int64: at which of these feature row 0 of the dataset would be, if all
            rows lay before and behind those of the shard; anything where it is not mapped.
        is_whole: All files are mapped.
    """

    is_open: NDArray[np.bool_]
    everywhere: NDArray[np.void]
    origins: NDArray[np.int64]
    is_whole: bool

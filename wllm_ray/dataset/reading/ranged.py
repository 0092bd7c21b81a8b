"""A features file in an object store, of which only those bytes are read that are wanted."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.format.dtypes import Dtype, all_finite, numpy_dtype
from wllm_ray.dataset.format.features import NPY_HEADER_BYTES, arrow_schema, decode_features
from wllm_ray.dataset.format.manifest import Asked, FeatureArray
from wllm_ray.dataset.stores.store import Store

__all__ = ["RangedFile", "open_ranged"]

# More than Arrow puts around the schema at either end of a file with one record batch.
_ARROW_FRAME_BYTES = 4096
# What is asked for at once where a whole file is checked that is not kept.
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class RangedFile:
    """Where the values of a features file are.

    Attributes:
        store: Where it lies.
        key: Its name there.
        size: Its bytes.
        start: Where its values begin.
        rows: How many feature rows it holds.
        axes: The shape of each.
        dtype: How they are stored.
    """

    store: Store
    key: str
    size: int
    start: int
    rows: int
    axes: tuple[int, ...]
    dtype: Dtype

    def pick(self, rows: NDArray[np.int64], column: int | None) -> NDArray[Any]:
        """Some feature rows as stored, [n, …] in the order asked for.

        Args:
            rows: Their numbers in this file.
            column: The one place of the first axis that is wanted, or None for all.

        Raises:
            NotFoundError: The file is not there any more (``object_not_found``).
            StorageError: The store failed to read, or the file is shorter.
        """
        axes = self.axes if column is None else self.axes[1:]
        wanted, inverse = np.unique(rows, return_inverse=True)
        if not len(wanted):
            return np.empty((0, *axes), numpy_dtype(self.dtype))
        width = self._bytes_of(axes)
        begins = self.start + wanted * self._bytes_of(self.axes) + (column or 0) * width
        parts = self.store.get_ranges(self.key, _joined(begins, begins + width))
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        found = np.frombuffer(data, numpy_dtype(self.dtype)).reshape(-1, *axes)
        return found if np.array_equal(rows, wanted) else found[inverse]

    def sha256_and_finite(self) -> tuple[str, bool]:
        """SHA-256 of the file and whether its values are finite, in memory that does not grow."""
        total, finite = hashlib.sha256(), True
        stop = self.start + self.rows * self._bytes_of(self.axes)
        for start, piece in self._pieces(stop):
            total.update(piece)
            if self.start <= start < stop:
                values = np.frombuffer(piece, numpy_dtype(self.dtype))
                finite = finite and all_finite(values, self.dtype)
        return total.hexdigest(), finite

    def _pieces(self, stop: int) -> Iterator[tuple[int, bytes]]:
        """The whole file, cut where the values begin and where they stop."""
        cuts = [0, *range(self.start, stop, _PIECE_BYTES), stop, self.size]
        for start, end in pairwise(cuts):
            yield start, self.store.get_range(self.key, start, end)

    def _bytes_of(self, axes: tuple[int, ...]) -> int:
        return math.prod(axes) * numpy_dtype(self.dtype).itemsize


def open_ranged(
    asked: Asked, array: FeatureArray, store: Store, key: str, *, size: int, rows: int
) -> RangedFile:
    """Find out where the values begin; nothing but the two ends of the file is read.

    The ends are put where they belong in memory of the file's size, which takes up no room where
    nobody touches it, and decoded as a whole file is: both pass the same checks.

    Args:
        asked: Says format and dtype.
        array: Which array.
        store: Where the file lies.
        key: Its name there.
        size: Its bytes.
        rows: How many feature rows the manifest says.

    Raises:
        IntegrityError: ``array_invalid`` or ``size_mismatch``.
        NotFoundError: It is not there any more (``object_not_found``).
        StorageError: The store failed to read, or the file is shorter.
    """
    end = NPY_HEADER_BYTES
    if asked.shard_format == "arrow":
        end = arrow_schema(asked, array).serialize().size + _ARROW_FRAME_BYTES
    ends = [(0, size)] if size <= 2 * end else [(0, end), (size - end, size)]
    raw = np.zeros(size, np.uint8)
    for (start, stop), part in zip(ends, store.get_ranges(key, ends), strict=True):
        raw[start:stop] = np.frombuffer(part, np.uint8)
    values = decode_features(asked, array, raw, rows, key.rpartition("/")[2])
    begins = values.ctypes.data - raw.ctypes.data if values.size else size
    return RangedFile(store, key, size, begins, rows, array.axes, asked.dtype)


def _joined(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Ranges in ascending order, those that touch made one."""
    cuts = np.flatnonzero(begins[1:] != ends[:-1]) + 1
    firsts, lasts = begins[np.r_[0, cuts]], ends[np.r_[cuts - 1, -1]]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))

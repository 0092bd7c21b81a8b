"""Read feature rows out of a dataset: all of them, or batches in or out of order."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wllm_ray.dataset.format.dtypes import numpy_dtype, widen
from wllm_ray.dataset.reading.files import DatasetFiles
from wllm_ray.dataset.reading.picking import Picker, pieces
from wllm_ray.dataset.reading.rowindex import Labels, Origins, RowIndex
from wllm_ray.errors import InvalidInputError
from wllm_ray.lazy import lazy

__all__ = ["Batch", "Batches", "labelled", "stored", "whole", "writable"]

# Shards that are read at once into one array: they are hashed on the way, on as many cores.
_THREADS = 4


@dataclass(frozen=True, eq=False)
class Batch:
    """Some feature rows, and where each comes from.

    The token that feature row *i* was read at is ``token_ids[rows[i]][index_in_row[i]]`` at
    ``all_prompt``, where a row has a feature row for each of its tokens. At ``index:…`` it is the
    ``index_in_row[i]``-th of the tokens that were listed; other positions have one feature row.

    Attributes:
        features: [B, D] for one site, else [B, L, D], float32.
        origins: Where each comes from.
    """

    features: NDArray[np.float32]
    origins: Origins

    def __len__(self) -> int:
        return len(self.features)

    def __repr__(self) -> str:
        shape = " × ".join(map(str, self.features.shape[1:]))
        return f"Batch({len(self)} feature rows × {shape})"

    @property
    def row_ids(self) -> list[str]:
        """For each feature row, the id of the row that it belongs to; made when asked for."""
        return self.origins.row_ids

    @property
    def rows(self) -> NDArray[np.int64]:
        """[B] int64: the place of that row in ``row_ids``, ``metadata`` and ``token_ids``."""
        return self.origins.rows

    @property
    def index_in_row(self) -> NDArray[np.int64]:
        """[B] int64: which of the row's feature rows it is, from 0."""
        return self.origins.index_in_row


@dataclass(frozen=True)
class Batches:
    """All batches of one pass over a dataset, each read when it is asked for.

    Attributes:
        picker: Reads the features.
        rows: Knows which rows they belong to.
        size: Feature rows per batch.
        seed: Of the permutation that they are shuffled by, or None for the order of the dataset.
        drop_last: Whether a last batch that is shorter is left out.

    Raises:
        InvalidInputError: ``size`` is no positive integer, or ``seed`` is negative or no integer
            (``invalid_argument``).
    """

    picker: Picker
    rows: RowIndex
    size: int
    seed: int | None
    drop_last: bool

    def __post_init__(self) -> None:
        _expect_integer("size", self.size, 1)
        if self.seed is not None:
            _expect_integer("seed", self.seed, 0)

    def __len__(self) -> int:
        full, rest = divmod(self._total, self.size)
        return full + bool(rest and not self.drop_last)

    def __iter__(self) -> Iterator[Batch]:
        return (self.batch(number) for number in range(len(self)))

    def batch(self, number: int) -> Batch:
        """One batch, float32."""
        origins, features = self.stored(number)
        return Batch(widen(features, self.picker.files.manifest.dtype), origins)

    def stored(self, number: int) -> tuple[Origins, NDArray[Any]]:
        """One batch: where its feature rows come from, and they themselves as stored."""
        start = number * self.size
        stop = min(start + self.size, self._total)
        if self._order is None:
            return self._origins_of_run(start, stop), self.picker.run(start, stop)
        wanted = self._order[start:stop]
        return self.rows.all_labels.of(wanted), self.picker.pick(wanted, sweep=True)

    def _origins_of_run(self, start: int, stop: int) -> Origins:
        """Of consecutive feature rows: only the tables of their shards are read."""
        parts = [
            self.rows.labels(shard).of(np.arange(begin, end))
            for shard, begin, end in pieces(self.picker.files.starts, start, stop)
        ]
        if len(parts) == 1:
            return parts[0]
        rows = np.concatenate([part.rows for part in parts])
        index_in_row = np.concatenate([part.index_in_row for part in parts])
        ids = pa.concat_arrays([part.ids.take(pa.array(part.places)) for part in parts])
        return Origins(ids, np.arange(len(rows)), rows, index_in_row)

    @property
    def _total(self) -> int:
        return self.picker.files.manifest.feature_rows

    @lazy
    def _order(self) -> NDArray[np.int64] | None:
        if self.seed is None:
            return None
        return np.random.default_rng(self.seed).permutation(self._total)


def _expect_integer(name: str, found: Any, least: int) -> None:
    """Take any integer, NumPy's too."""
    try:
        is_right = operator.index(found) >= least
    except TypeError:
        is_right = False
    if not is_right:
        raise InvalidInputError(
            f"{name} is an integer from {least} on, found {name} {found!r}",
            code="invalid_argument",
        )


def labelled(picker: Picker, labels: Labels, wanted: NDArray[np.int64]) -> Batch:
    """Feature rows by number, in any order.

    Args:
        picker: Reads the features.
        labels: Of all feature rows.
        wanted: [B] int64.
    """
    features = widen(picker.pick(wanted), picker.files.manifest.dtype)
    return Batch(features, labels.of(wanted))


def whole(files: DatasetFiles, site: int | None) -> NDArray[np.float32]:
    """All feature rows as float32, [N, D] of one site, else [N, L, D]; read-only.

    A view of the mapped file where one file holds them and stores float32.

    Args:
        files: The dataset's files.
        site: The site's number, or None for all.
    """
    if len(files.manifest.shards) == 1:
        array = files.features(0, site)
    else:
        array = np.empty((files.starts[-1], *files.row_shape(site)), np.float32)
        _fill(array, lambda shard: files.features(shard, site), files)
    array.flags.writeable = False
    return array


def stored(files: DatasetFiles, site: int | None) -> NDArray[Any]:
    """As :func:`whole`, but as stored; a view of the mapped file where one file holds them."""
    array = files.stored(0, site) if len(files.manifest.shards) == 1 else _gathered(files, site)
    array.flags.writeable = False
    return array


def writable(files: DatasetFiles, site: int | None) -> NDArray[Any]:
    """As :func:`stored`, but it may be changed without touching the files."""
    one_shard = len(files.manifest.shards) == 1
    return files.private(0, site) if one_shard else _gathered(files, site)


def _gathered(files: DatasetFiles, site: int | None) -> NDArray[Any]:
    """All feature rows as stored, in a new array."""
    shape = (files.starts[-1], *files.row_shape(site))
    array = np.empty(shape, numpy_dtype(files.manifest.dtype))
    _fill(array, lambda shard: files.stored(shard, site), files)
    return array


def _fill(array: NDArray[Any], read: Callable[[int], NDArray[Any]], files: DatasetFiles) -> None:
    """Read every shard into its place."""

    def fill(shard: int) -> None:
        array[files.starts[shard] : files.starts[shard + 1]] = read(shard)

    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(fill, range(len(files.manifest.shards))))

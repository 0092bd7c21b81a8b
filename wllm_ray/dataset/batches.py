"""Read feature rows out of a dataset: all, any that are wanted, or batches in or out of order.

``site`` is everywhere the number of the site that is read, or None for all of them in one array.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.files import DatasetFiles
from wllm_ray.errors import InvalidInputError

__all__ = ["Batch", "iter_batches", "pick", "whole", "writable"]


class Batch(NamedTuple):
    """Some feature rows.

    Attributes:
        row_ids: For each feature row, the id of the row that it belongs to.
        features: [B, D] for one site, else [B, L, D], float32.
    """

    row_ids: list[str]
    features: NDArray[np.float32]


def iter_batches(
    files: DatasetFiles,
    site: int | None,
    row_ids: Sequence[str],
    offsets: NDArray[np.int64],
    size: int,
    *,
    seed: int | None,
) -> Iterator[Batch]:
    """Batches of ``size`` feature rows; shuffled where there is a seed.

    Args:
        files: The dataset's files.
        site: Which site, or None.
        row_ids: Ids of the good rows.
        offsets: [rows + 1] int64, where the feature rows of each begin and end.
        size: Feature rows per batch.
        seed: For the permutation.

    Raises:
        InvalidInputError: ``size`` is not positive (``invalid_argument``).
        NotOfferedError: All sites are asked for, and they differ in width
            (``widths_not_representable``).
    """
    if size < 1:
        raise InvalidInputError(
            f"a batch holds at least one row, found size {size}", code="invalid_argument"
        )
    files.row_shape(site)  # refuses now, not when the first batch is wanted
    order = None
    if seed is not None:
        order = np.random.default_rng(seed).permutation(files.manifest.feature_rows)
    return _iterate(files, site, row_ids, offsets, _cut(files.manifest.feature_rows, size, order))


def _cut(
    total: int, size: int, order: NDArray[np.int64] | None
) -> Iterator[slice | NDArray[np.int64]]:
    """Which feature rows each batch has: consecutive ones, or some in a given order."""
    for at in range(0, total, size):
        stop = min(at + size, total)
        yield slice(at, stop) if order is None else order[at:stop]


def _iterate(
    files: DatasetFiles,
    site: int | None,
    row_ids: Sequence[str],
    offsets: NDArray[np.int64],
    wanted: Iterator[slice | NDArray[np.int64]],
) -> Iterator[Batch]:
    for one in wanted:
        if isinstance(one, slice):
            numbers, features = np.arange(one.start, one.stop), _run(files, site, one)
        else:
            numbers, features = one, pick(files, site, one)
        rows = np.searchsorted(offsets, numbers, side="right") - 1
        yield Batch([row_ids[row] for row in rows.tolist()], features)


def _run(files: DatasetFiles, site: int | None, wanted: slice) -> NDArray[np.float32]:
    """Consecutive feature rows; a view of the mapped file where one file holds them."""
    starts, at, stop = files.starts, wanted.start, wanted.stop
    first = int(np.searchsorted(starts, at, side="right")) - 1
    last = int(np.searchsorted(starts, stop, side="left")) - 1
    parts = [
        files.features(shard, site, slice(max(at - starts[shard], 0), stop - starts[shard]))
        for shard in range(first, last + 1)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def pick(files: DatasetFiles, site: int | None, wanted: NDArray[np.int64]) -> NDArray[np.float32]:
    """Feature rows by number, in any order; only the shards that hold them are read.

    Args:
        files: The dataset's files.
        site: Which site, or None.
        wanted: [B] int64.

    Returns:
        [B, D] of one site, else [B, L, D]; a copy.
    """
    result = np.empty((len(wanted), *files.row_shape(site)), np.float32)
    if not len(wanted):
        return result
    starts = files.starts
    shards = np.searchsorted(starts, wanted, side="right") - 1
    by_shard = np.argsort(shards, kind="stable")
    present, begins = np.unique(shards[by_shard], return_index=True)
    for shard, places in zip(present.tolist(), np.split(by_shard, begins[1:]), strict=True):
        result[places] = files.features(shard, site, wanted[places] - starts[shard])
    return result


def whole(files: DatasetFiles, site: int | None) -> NDArray[np.float32]:
    """All feature rows, [N, D] of one site, else [N, L, D]; read-only.

    A view of the mapped file where one file holds them.
    """
    one_shard = len(files.manifest.shards) == 1
    array = files.features(0, site) if one_shard else _gathered(files, site)
    array.flags.writeable = False
    return array


def writable(files: DatasetFiles, site: int | None) -> NDArray[np.float32]:
    """As :func:`whole`, but it may be changed without touching the files."""
    one_shard = len(files.manifest.shards) == 1
    return files.private(0, site) if one_shard else _gathered(files, site)


def _gathered(files: DatasetFiles, site: int | None) -> NDArray[np.float32]:
    """All feature rows in a new array."""
    result = np.empty((files.starts[-1], *files.row_shape(site)), np.float32)
    for shard, (start, stop) in enumerate(pairwise(files.starts.tolist())):
        result[start:stop] = files.features(shard, site)
    return result

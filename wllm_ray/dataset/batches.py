"""Stream feature rows out of a dataset in batches, in order or shuffled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.files import DatasetFiles
from wllm_ray.errors import InvalidInputError

__all__ = ["Batch", "iter_batches"]


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
    row_ids: Sequence[str],
    offsets: NDArray[np.int64],
    size: int,
    seed: int | None,
) -> Iterator[Batch]:
    """Batches of ``size`` feature rows; shuffled where there is a seed.

    Raises:
        InvalidInputError: ``size`` is not positive (``invalid_argument``).
    """
    if size < 1:
        raise InvalidInputError(
            f"a batch holds at least one row, found size {size}", code="invalid_argument"
        )
    return _iterate(files, row_ids, offsets, size, seed)


def _iterate(
    files: DatasetFiles,
    row_ids: Sequence[str],
    offsets: NDArray[np.int64],
    size: int,
    seed: int | None,
) -> Iterator[Batch]:
    total = files.manifest.feature_rows
    starts = np.cumsum([0] + [shard.feature_rows for shard in files.manifest.shards])
    order = None if seed is None else np.random.default_rng(seed).permutation(total)
    for at in range(0, total, size):
        stop = min(at + size, total)
        wanted = np.arange(at, stop) if order is None else order[at:stop]
        features = _run(files, starts, at, stop) if order is None else _pick(files, starts, wanted)
        rows = np.searchsorted(offsets, wanted, side="right") - 1
        one_site = len(files.manifest.sites) == 1
        yield Batch(
            [row_ids[row] for row in rows.tolist()], features[:, 0] if one_site else features
        )


def _run(files: DatasetFiles, starts: NDArray[np.int64], at: int, stop: int) -> NDArray[np.float32]:
    """Consecutive feature rows; a view of the mapped file where one shard holds them."""
    first = int(np.searchsorted(starts, at, side="right")) - 1
    last = int(np.searchsorted(starts, stop, side="left")) - 1
    parts = [
        files.features(shard)[max(at - starts[shard], 0) : stop - starts[shard]]
        for shard in range(first, last + 1)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _pick(
    files: DatasetFiles, starts: NDArray[np.int64], wanted: NDArray[np.int64]
) -> NDArray[np.float32]:
    """Feature rows in any order, read shard by shard."""
    result = np.empty((len(wanted), *files.manifest.shape[1:]), np.float32)
    shards = np.searchsorted(starts, wanted, side="right") - 1
    by_shard = np.argsort(shards, kind="stable")
    present, begins = np.unique(shards[by_shard], return_index=True)
    for shard, places in zip(present.tolist(), np.split(by_shard, begins[1:]), strict=True):
        result[places] = files.features(shard)[wanted[places] - starts[shard]]
    return result

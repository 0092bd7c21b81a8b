"""What the formats say of a shard's rows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wllm_ray.dataset.reading.files import DatasetFiles
from wllm_ray.dataset.reading.rowtable import good_rows, token_arrays
from wllm_ray.errors import InvalidInputError
from wllm_ray.positions import is_of_tokens, resolve

__all__ = ["offsets_of", "shards", "shards_with_rows", "token_positions", "tokens_of"]


def shards(files: DatasetFiles) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Number and good rows of each shard, checked as they are read."""
    for shard in files.manifest.shards:
        yield shard.shard, good_rows(files.rows(shard.shard))


def shards_with_rows(files: DatasetFiles) -> Iterator[tuple[int, pa.RecordBatch]]:
    """As :func:`shards`, without those of failed rows only: not every reader takes an empty file.

    Raises:
        InvalidInputError: No shard is left (``invalid_argument``).
    """
    if not files.manifest.rows_ok:
        raise InvalidInputError(
            f"no row of dataset {files.manifest.dataset_id!r} has an activation, and what reads "
            f"this format cannot load an empty dataset; --to parquet can hold one",
            code="invalid_argument",
        )
    return ((shard, good) for shard, good in shards(files) if good.num_rows)


def offsets_of(good: pa.RecordBatch) -> NDArray[np.int64]:
    """[rows + 1] int64: row *i* of the shard is feature rows ``offsets[i]`` to ``[i + 1]``."""
    lengths: NDArray[np.int64] = good.column("length").to_numpy()
    return np.concatenate([np.zeros(1, np.int64), lengths.cumsum()])


def tokens_of(good: pa.RecordBatch) -> list[NDArray[np.int32]]:
    """The token ids of each row."""
    return [ids for ids in token_arrays(good) if ids is not None]


def token_positions(position: str, good: pa.RecordBatch) -> list[NDArray[np.int64]] | None:
    """For each row, which of its tokens its feature rows are of, counted from 0.

    None where they are of no one prompt token.
    """
    if not is_of_tokens(position):
        return None
    return [resolve(position, len(ids)) for ids in tokens_of(good)]

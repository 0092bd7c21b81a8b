"""The good rows and their features as one Arrow table, shard by shard, without joining arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wllm_ray.dataset.format.manifest import Manifest
from wllm_ray.dataset.format.rows import ROWS_SCHEMA
from wllm_ray.dataset.reading.files import DatasetFiles
from wllm_ray.positions import feature_rows_of

__all__ = ["features_batch", "features_table"]

_ROW_COLUMNS = ("id", "metadata", "token_ids")


def features_table(files: DatasetFiles, good: Sequence[pa.RecordBatch]) -> pa.Table:
    """One record batch per shard: id, metadata, token_ids, and each site under its name.

    Args:
        files: The dataset's files.
        good: The good rows of each shard.
    """
    batches = [features_batch(files, shard, rows) for shard, rows in enumerate(good)]
    return pa.Table.from_batches(batches, schema=_schema(files.manifest))


def features_batch(files: DatasetFiles, shard: int, good: pa.RecordBatch) -> pa.RecordBatch:
    """The part of :func:`features_table` that one shard is.

    Args:
        files: The dataset's files.
        shard: Its number.
        good: Its good rows.
    """
    schema = _schema(files.manifest)
    sites = [
        _vectors(files.features(shard, number), vector)
        for number, vector in enumerate(_vector_types(files.manifest))
    ]
    if _is_ragged(files.manifest):
        lengths = good.column("length").to_numpy()
        offsets = pa.array(np.concatenate([[0], lengths.cumsum()]), pa.int64())
        sites = [
            pa.LargeListArray.from_arrays(offsets, one, type=schema.field(name).type)
            for name, one in zip(files.manifest.sites, sites, strict=True)
        ]
    columns = [good.column(name) for name in _ROW_COLUMNS]
    return pa.record_batch(columns + sites, schema=schema)


def _schema(manifest: Manifest) -> pa.Schema:
    vectors = _vector_types(manifest)
    types = [_list_of(vector) for vector in vectors] if _is_ragged(manifest) else vectors
    return pa.schema(
        [ROWS_SCHEMA.field(name) for name in _ROW_COLUMNS]
        + [
            pa.field(site, column, nullable=False)
            for site, column in zip(manifest.sites, types, strict=True)
        ]
    )


def _vector_types(manifest: Manifest) -> list[pa.DataType]:
    return [
        pa.list_(pa.field("item", pa.float32(), nullable=False), width)
        for width in manifest.site_widths
    ]


def _is_ragged(manifest: Manifest) -> bool:
    """Whether a row may have several vectors."""
    return feature_rows_of(manifest.position, 0) != 1


def _list_of(vector: pa.DataType) -> pa.DataType:
    """The vectors of one row where it may have several."""
    return pa.large_list(pa.field("item", vector, nullable=False))


def _vectors(values: NDArray[np.float32], vector: pa.DataType) -> pa.Array:
    """[N, D] float32 as a list column; not copied where it is contiguous."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), pa.float32())
    return pa.FixedSizeListArray.from_arrays(flat, type=vector)

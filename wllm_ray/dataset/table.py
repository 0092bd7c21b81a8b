"""The good rows and their features as one Arrow table, shard by shard, without joining arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wllm_ray.dataset.files import DatasetFiles
from wllm_ray.dataset.shard import ROWS_SCHEMA
from wllm_ray.positions import feature_rows_of

__all__ = ["features_table"]

_ROW_COLUMNS = ("id", "metadata", "token_ids")


def features_table(files: DatasetFiles, good: Sequence[pa.RecordBatch]) -> pa.Table:
    """One record batch per shard: id, metadata, token_ids, and each site under its name.

    Args:
        files: The dataset's files.
        good: The good rows of each shard.
    """
    manifest = files.manifest
    ragged = feature_rows_of(manifest.position, 0) != 1
    vectors = [
        pa.list_(pa.field("item", pa.float32(), nullable=False), width)
        for width in manifest.site_widths
    ]
    types = [_list_of(vector) if ragged else vector for vector in vectors]
    schema = pa.schema(
        [ROWS_SCHEMA.field(name) for name in _ROW_COLUMNS]
        + [
            pa.field(site, column, nullable=False)
            for site, column in zip(manifest.sites, types, strict=True)
        ]
    )
    batches = []
    for shard, rows in enumerate(good):
        sites = [
            _vectors(files.features(shard, number), vector) for number, vector in enumerate(vectors)
        ]
        if ragged:
            lengths = rows.column("length").to_numpy()
            offsets = pa.array(np.concatenate([[0], lengths.cumsum()]), pa.int64())
            sites = [
                pa.LargeListArray.from_arrays(offsets, one, type=column)
                for one, column in zip(sites, types, strict=True)
            ]
        columns = [rows.column(name) for name in _ROW_COLUMNS]
        batches.append(pa.record_batch(columns + sites, schema=schema))
    return pa.Table.from_batches(batches, schema=schema)


def _list_of(vector: pa.DataType) -> pa.DataType:
    """The vectors of one row where it may have several."""
    return pa.large_list(pa.field("item", vector, nullable=False))


def _vectors(values: NDArray[np.float32], vector: pa.DataType) -> pa.Array:
    """[N, D] float32 as a list column; not copied where it is contiguous."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), pa.float32())
    return pa.FixedSizeListArray.from_arrays(flat, type=vector)

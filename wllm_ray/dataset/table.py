"""The good rows and their features as one Arrow table, shard by shard, without joining arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wllm_ray.dataset.assemble import feature_rows_of
from wllm_ray.dataset.files import DatasetFiles
from wllm_ray.dataset.shard import ROWS_SCHEMA

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
    vector = pa.list_(pa.field("item", pa.float32(), nullable=False), manifest.hidden_size)
    column = pa.large_list(pa.field("item", vector, nullable=False)) if ragged else vector
    schema = pa.schema(
        [ROWS_SCHEMA.field(name) for name in _ROW_COLUMNS]
        + [pa.field(site, column, nullable=False) for site in manifest.sites]
    )
    batches = []
    for shard, rows in enumerate(good):
        features = files.features(shard)
        sites = [_vectors(features[:, number], vector) for number in range(len(manifest.sites))]
        if ragged:
            lengths = rows.column("length").to_numpy()
            offsets = pa.array(np.concatenate([[0], lengths.cumsum()]), pa.int64())
            sites = [pa.LargeListArray.from_arrays(offsets, one, type=column) for one in sites]
        columns = [rows.column(name) for name in _ROW_COLUMNS]
        batches.append(pa.record_batch(columns + sites, schema=schema))
    return pa.Table.from_batches(batches, schema=schema)


def _vectors(values: NDArray[np.float32], vector: pa.DataType) -> pa.Array:
    """[N, D] float32 as a list column; not copied where it is contiguous."""
    flat = pa.array(np.ascontiguousarray(values).reshape(-1), pa.float32())
    return pa.FixedSizeListArray.from_arrays(flat, type=vector)

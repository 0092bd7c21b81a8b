"""Write the files of one shard, each under its content name."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.format.dtypes import numpy_dtype
from wllm_ray.dataset.format.features import encode_features
from wllm_ray.dataset.format.layout import (
    ROWS_SUFFIX,
    TRACE_SUFFIX,
    content_prefix,
    features_suffix,
)
from wllm_ray.dataset.format.manifest import DatasetSpec, FeatureArray, FileEntry
from wllm_ray.dataset.format.rows import encode_rows, rows_sha256
from wllm_ray.dataset.format.trace import encode_traces
from wllm_ray.dataset.stores.store import Store, Stored
from wllm_ray.dataset.writing.assemble import AssembledShard
from wllm_ray.records import CapturedChunk

__all__ = ["write_files"]

# Files that are written at once; each may need a copy of its site.
_WRITERS = 4


def write_files(
    store: Store,
    spec: DatasetSpec,
    shard: int,
    assembled: AssembledShard,
    captured: Sequence[CapturedChunk],
) -> tuple[tuple[FileEntry, ...], str]:
    """Write the features files, the rows table and the traces.

    Args:
        store: The storage root.
        spec: What was asked.
        shard: Which shard.
        assembled: Its rows and features.
        captured: The chunks as they were captured, which hold the traces.

    Returns:
        What the receipt says of the files, and the shard rows digest.

    Raises:
        StorageError: The root refused a write.
    """
    prefix = content_prefix(spec.dataset_id, shard)

    def write_array(array: FeatureArray) -> FileEntry:
        return _write_array(store, spec, prefix, array, assembled)

    # The features are on their way while anything is done for single rows.
    with ThreadPoolExecutor(min(_WRITERS, len(spec.arrays))) as pool:
        writing = pool.map(write_array, spec.arrays)
        digest = rows_sha256(assembled.rows)
        rows = store.put_content(prefix, ROWS_SUFFIX, encode_rows(assembled.rows))
        entries = (*writing, _entry(rows, "rows"))
    if spec.trace is None:
        return entries, digest
    parts = encode_traces(spec, assembled.rows, _traced(assembled, captured))
    traces = store.put_content(prefix, TRACE_SUFFIX, parts)
    return (*entries, _entry(traces, "trace")), digest


def _traced(
    assembled: AssembledShard, captured: Sequence[CapturedChunk]
) -> list[NDArray[np.float32]]:
    """[T, sum of the trace's widths] float32 of each good row."""
    spans = [_spans(chunk) for chunk in captured]
    indices = assembled.rows.first_row + np.flatnonzero(assembled.rows.is_good)
    pairs = zip(indices.tolist(), assembled.chunks, strict=True)
    return [captured[number].features[spans[number][index]] for index, number in pairs]


def _spans(chunk: CapturedChunk) -> dict[int, slice]:
    """Row index → where its tokens stand in the chunk's features."""
    stops = np.cumsum(chunk.lengths).tolist()
    each = zip(chunk.row_index.tolist(), chunk.lengths.tolist(), stops, strict=True)
    return {index: slice(stop - length, stop) for index, length, stop in each}


def _write_array(
    store: Store, spec: DatasetSpec, prefix: str, array: FeatureArray, assembled: AssembledShard
) -> FileEntry:
    # Not copied where the array has all columns.
    blocks = [np.ascontiguousarray(block[:, array.columns]) for block in assembled.features]
    parts = encode_features(spec, array, blocks, assembled.feature_rows)
    stored = store.put_content(prefix, features_suffix(array.site, spec.shard_format), parts)
    shape = (assembled.feature_rows, *array.axes)
    dtype = numpy_dtype(spec.dtype).str
    return _entry(stored, "features", site=array.site, shape=shape, dtype=dtype)


def _entry(
    stored: Stored,
    role: Literal["features", "rows", "trace"],
    *,
    site: str | None = None,
    shape: tuple[int, ...] | None = None,
    dtype: str | None = None,
) -> FileEntry:
    return FileEntry(
        name=stored.key.rpartition("/")[2],
        role=role,
        site=site,
        bytes=stored.bytes,
        sha256=stored.sha256,
        shape=shape,
        dtype=dtype,
    )

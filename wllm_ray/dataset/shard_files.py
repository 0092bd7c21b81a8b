"""Write the files of one shard, each under its content name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np

from wllm_ray.dataset.assemble import AssembledShard
from wllm_ray.dataset.layout import ROWS_SUFFIX, content_prefix, features_suffix
from wllm_ray.dataset.manifest import DatasetSpec, FeatureArray, FileEntry
from wllm_ray.dataset.shard import NPY_DTYPE, encode_rows, npy_header
from wllm_ray.dataset.store import Store, Stored

__all__ = ["write_files"]

# Files that are written at once; each may need a copy of its site.
_WRITERS = 4


def write_files(
    store: Store, spec: DatasetSpec, shard: int, assembled: AssembledShard
) -> tuple[FileEntry, ...]:
    """Write the features files and the rows table; returns what the receipt says of them.

    Raises:
        StorageError: The root refused a write.
    """
    prefix = content_prefix(spec.dataset_id, shard)

    def write_array(array: FeatureArray) -> FileEntry:
        return _write_array(store, prefix, array, assembled)

    # The features are written while the table is encoded; the receipt waits for all.
    with ThreadPoolExecutor(min(_WRITERS, len(spec.arrays))) as pool:
        writing = pool.map(write_array, spec.arrays)
        rows = store.put_content(prefix, ROWS_SUFFIX, encode_rows(assembled.outcomes))
        features = tuple(writing)
    return (*features, _entry(rows, "rows"))


def _write_array(
    store: Store, prefix: str, array: FeatureArray, assembled: AssembledShard
) -> FileEntry:
    shape = (assembled.feature_rows, *array.axes)
    # Not copied where the array has all columns.
    blocks = (np.ascontiguousarray(block[:, array.columns]) for block in assembled.features)
    data: list[bytes | memoryview] = [npy_header(shape)]
    data += [memoryview(block.data) for block in blocks]
    stored = store.put_content(prefix, features_suffix(array.site), data)
    return _entry(stored, "features", site=array.site, shape=shape, dtype=NPY_DTYPE)


def _entry(
    stored: Stored,
    role: Literal["features", "rows"],
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

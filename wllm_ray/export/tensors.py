"""safetensors: one file per shard with a tensor for each site, and a JSON file of its rows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from wllm_ray.dataset.format.dtypes import narrow
from wllm_ray.dataset.reading.files import DatasetFiles
from wllm_ray.digest import canonical_json, parse_json
from wllm_ray.export.rows import offsets_of, shards, token_positions, tokens_of
from wllm_ray.extras import require_extra

__all__ = ["write_safetensors"]


def write_safetensors(files: DatasetFiles, folder: Path) -> None:
    """``shard-00000.safetensors`` and ``shard-00000.json`` and so on.

    A tensor is called as its site, [feature rows, D] in the dtype that the dataset is stored in.
    The JSON has ``offsets``, so that row *i* is feature rows ``offsets[i]`` to
    ``offsets[i + 1]``, and for each row its ``id``, ``metadata``, ``token_ids`` and ``positions``:
    the tokens that its feature rows are of, or null.
    """
    for shard, good in shards(files):
        name = f"shard-{shard:05d}"
        tensors, rows = folder / f"{name}.safetensors", folder / f"{name}.json"
        _write_tensors(files, shard, tensors)
        rows.write_bytes(canonical_json(_rows(files, good)))
        # The library lets nobody but the owner read its files.
        shutil.copymode(rows, tensors)


def _write_tensors(files: DatasetFiles, shard: int, path: Path) -> None:
    manifest, safetensors = files.manifest, require_extra("safetensors", "export")
    # Features come as float32, which holds what is stored exactly; NumPy has no name for bfloat16.
    arrays = {
        site: np.ascontiguousarray(narrow(files.features(shard, number), manifest.dtype))
        for number, site in enumerate(manifest.sites)
    }
    tensors = {
        site: safetensors.TensorSpec(
            dtype=manifest.dtype,
            shape=array.shape,
            data_ptr=array.ctypes.data,
            data_len=array.nbytes,
        )
        for site, array in arrays.items()
    }
    facts = {
        "dataset_id": manifest.dataset_id,
        "manifest_sha256": manifest.manifest_sha256,
        "position": manifest.position,
    }
    safetensors.serialize_file(tensors, path, metadata=facts)


def _rows(files: DatasetFiles, good: pa.RecordBatch) -> dict[str, Any]:
    positions = token_positions(files.manifest.position, good)
    columns = zip(
        good.column("id").to_pylist(),
        good.column("metadata").to_pylist(),
        tokens_of(good),
        [None] * good.num_rows if positions is None else [one.tolist() for one in positions],
        strict=True,
    )
    return {
        "offsets": offsets_of(good).tolist(),
        "rows": [
            {
                "id": row_id,
                "metadata": parse_json(metadata),
                "token_ids": ids.tolist(),
                "positions": places,
            }
            for row_id, metadata, ids, places in columns
        ],
    }

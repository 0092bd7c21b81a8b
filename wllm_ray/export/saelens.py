"""SAELens: what its ``cached_activations_path`` reads, a saved Hugging Face dataset."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wllm_ray.dataset.format.manifest import Manifest
from wllm_ray.dataset.reading.files import DatasetFiles
from wllm_ray.export.rows import offsets_of, shards_with_rows, token_positions, tokens_of
from wllm_ray.extras import require_extra
from wllm_ray.positions import is_of_tokens
from wllm_ray.sites import parse_site

__all__ = ["hook_name", "write_saelens"]

# What TransformerLens, and so SAELens, has a name for.
_LENS_KINDS = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
_PARTS = "parts"
# What is converted at a time.
_BATCH_BYTES = 64 << 20


def hook_name(site: str) -> str:
    """TransformerLens' name of a site; its own where that has none."""
    parsed = parse_site(site)
    named = parsed.kind in _LENS_KINDS
    return f"blocks.{parsed.layer}.hook_{parsed.kind}" if named else site


def write_saelens(files: DatasetFiles, folder: Path) -> None:
    """A column [1, D] float32 for each site, under TransformerLens' name, one entry per vector.

    SAELens wants contexts of one length and trains on the single vectors. So every vector is a
    context of one token (``context_size=1``), however long its row is, and nothing is padded.
    ``token_ids`` is that token, so that SAELens can leave special tokens out; there is none where
    a vector is a mean. ``row_id`` is the id of the row.

    Raises:
        InvalidInputError: No row has an activation (``invalid_argument``).
        ModuleNotFoundError: ``datasets`` is not installed.
    """
    datasets = require_extra("datasets", "export")
    schema = _schema(datasets, files.manifest)
    (folder / _PARTS).mkdir()
    parts = []
    for shard, good in shards_with_rows(files):
        path = folder / _PARTS / f"{shard}.arrow"
        with pa.ipc.new_stream(path, schema) as writer:
            for batch in _batches(files, shard, good, schema):
                writer.write_batch(batch)
        parts.append(datasets.Dataset.from_file(str(path)))
    with _quiet(datasets):
        datasets.concatenate_datasets(parts).save_to_disk(folder, num_shards=len(parts))
    shutil.rmtree(folder / _PARTS)


def _schema(datasets: Any, manifest: Manifest) -> pa.Schema:
    """The columns as Arrow and as Hugging Face know them."""
    types = {
        hook_name(site): datasets.Array2D(shape=(1, width), dtype="float32")
        for site, width in zip(manifest.sites, manifest.site_widths, strict=True)
    }
    if is_of_tokens(manifest.position):
        types["token_ids"] = datasets.Sequence(datasets.Value("int32"), length=1)
    return datasets.Features(types | {"row_id": datasets.Value("string")}).arrow_schema


def _batches(
    files: DatasetFiles, shard: int, good: pa.RecordBatch, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """One shard's columns, some feature rows at a time."""
    manifest = files.manifest
    lengths = np.diff(offsets_of(good))
    ids = good.column("id").take(pa.array(np.repeat(np.arange(good.num_rows), lengths)))
    others = [ids.cast(pa.string())]
    tokens = _tokens(manifest, good)
    if tokens is not None:
        others.insert(0, pa.FixedSizeListArray.from_arrays(pa.array(tokens), 1))
    step = max(1, _BATCH_BYTES // (4 * sum(manifest.site_widths)))
    for start in range(0, int(lengths.sum()), step):
        rows = slice(start, start + step)
        sites = [
            _contexts(files.features(shard, number, rows), schema.field(number).type)
            for number in range(len(manifest.sites))
        ]
        yield pa.record_batch(sites + [one[rows] for one in others], schema=schema)


def _contexts(values: NDArray[np.float32], column: Any) -> pa.Array:
    """[n, D] float32 as a column of [1, D]."""
    count, width = values.shape
    vectors = pa.array(np.arange(0, count * width + 1, width), pa.int32())
    flat = pa.array(np.ascontiguousarray(values).reshape(-1))
    singles = pa.ListArray.from_arrays(vectors, flat)
    contexts = pa.ListArray.from_arrays(pa.array(np.arange(count + 1), pa.int32()), singles)
    return pa.ExtensionArray.from_storage(column, contexts)


def _tokens(manifest: Manifest, good: pa.RecordBatch) -> NDArray[np.int32] | None:
    """[feature rows] int32: the token that each feature row is of."""
    positions = token_positions(manifest.position, good)
    if positions is None:
        return None
    chosen = [ids[places] for ids, places in zip(tokens_of(good), positions, strict=True)]
    return np.concatenate(chosen)


@contextmanager
def _quiet(datasets: Any) -> Iterator[None]:
    """No progress bar for each file."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()

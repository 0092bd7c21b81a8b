"""Parquet: one file per shard, one row per row; and a folder of them as Hugging Face reads it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from wllm_ray.dataset.format.manifest import Manifest
from wllm_ray.dataset.reading.files import DatasetFiles
from wllm_ray.dataset.reading.table import features_batch
from wllm_ray.export.rows import offsets_of, shards, shards_with_rows, token_positions
from wllm_ray.positions import feature_rows_of

__all__ = ["write_hf", "write_parquet"]

_CARD = """\
---
license: unknown
pretty_name: "{dataset_id}"
tags:
- activations
- interpretability
---

# {dataset_id}

Activations of a language model: {rows} rows at position `{position}`.

| | |
|---|---|
| model | {model} |
| revision | `{revision}` |
| hook sites | {sites} |
| content digest | `{content_sha256}` |
| manifest digest | `{manifest_sha256}` |

A row is `id`, `metadata` (JSON text), `token_ids` and, under each hook site's name, its vector in
float32{several}. `_provenance.json` has the whole specification. Nobody has said under which
licence the data may be used: that of the model and that of the texts decide.
"""
_SEVERAL = ", or one vector for each token that `position` lists"
# Vectors do not compress, and ids and metadata are small beside them.
_OPTIONS = {"compression": "none", "use_dictionary": False, "write_statistics": False}


def write_parquet(files: DatasetFiles, folder: Path) -> None:
    """``shard-00000.parquet`` and so on.

    Columns are ``id``, ``metadata``, ``token_ids``, ``position`` where a row may have several
    vectors, and each site under its name: ``fixed_size_list<float32>[D]``, or a list of those.
    """
    for shard, good in shards(files):
        _write(files, shard, good, folder / f"shard-{shard:05d}.parquet")


def write_hf(files: DatasetFiles, folder: Path) -> None:
    """The same files where ``datasets.load_dataset(folder)`` finds them, and a card.

    Raises:
        InvalidInputError: No row has an activation (``invalid_argument``).
    """
    data = folder / "data"
    data.mkdir()
    count = sum(shard.rows > shard.rows_failed for shard in files.manifest.shards)
    for number, (shard, good) in enumerate(shards_with_rows(files)):
        _write(files, shard, good, data / f"train-{number:05d}-of-{count:05d}.parquet")
    (folder / "README.md").write_text(_card(files.manifest), encoding="utf-8")


def _write(files: DatasetFiles, shard: int, good: pa.RecordBatch, path: Path) -> None:
    batch = features_batch(files, shard, good)
    positions = token_positions(files.manifest.position, good)
    if positions is not None and _has_several(files.manifest):
        values = np.concatenate([np.empty(0, np.int64), *positions])
        column = pa.LargeListArray.from_arrays(pa.array(offsets_of(good)), pa.array(values))
        batch = batch.add_column(3, "position", column)
    pq.write_table(pa.Table.from_batches([batch]), path, **_OPTIONS)


def _has_several(manifest: Manifest) -> bool:
    return feature_rows_of(manifest.position, 0) != 1


def _card(manifest: Manifest) -> str:
    return _CARD.format(
        dataset_id=manifest.dataset_id,
        rows=manifest.rows_ok,
        position=manifest.position,
        model=_plain(manifest.model.name),
        revision=_plain(manifest.model.revision),
        sites=", ".join(f"`{site}`" for site in manifest.sites),
        content_sha256=manifest.content_sha256,
        manifest_sha256=manifest.manifest_sha256,
        several=_SEVERAL if _has_several(manifest) else "",
    )


def _plain(text: str) -> str:
    """A name as text that no reader of Markdown or HTML takes for anything else."""
    return "".join(one if one.isalnum() or one in " ./:-@" else f"&#{ord(one)};" for one in text)

"""A small dataset, built the way the coordinator builds one, without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from wllm_ray.dataset.format.layout import folder, manifest_key, receipt_key, spec_key
from wllm_ray.dataset.format.manifest import DatasetSpec, ShardSpec
from wllm_ray.dataset.reading.staged import load_spec, read_receipts
from wllm_ray.dataset.stores.store import Store
from wllm_ray.dataset.writing.writer import commit_manifest, create_spec, stage_shard
from wllm_ray.digest import canonical_json, request_digest, requests_digest
from wllm_ray.positions import feature_rows_of, resolve
from wllm_ray.records import (
    CapturedChunk,
    CaptureIdentity,
    EngineDescription,
    Fingerprint,
    ModelIdentity,
    RowFailure,
    RowRecord,
    SelfTestReport,
    SiteSupport,
    TokenizerIdentity,
)
from wllm_ray.tokens import tokens_bound

MODEL = ModelIdentity(name="tiny", revision="a" * 40, requested_revision="main")
TOKENIZER = TokenizerIdentity(name="tiny", revision="b" * 40, chat_template_sha256=None)
FINGERPRINT = Fingerprint(
    model_revision="a" * 40,
    tokenizer_revision="b" * 40,
    engine="fake",
    engine_version="1",
    engine_dtype="float32",
    precision="native",
    device="cpu",
    threads=1,
    prefill_split_tokens=64,
    reproducibility="bitwise",
)
SELFTEST = SelfTestReport(
    passed=True,
    checks={"hooks": "each fired once"},
    reproducibility="bitwise",
    measured_relative_l2=0.0,
    prompt_lengths=(8, 64),
    residual="sum",
    seconds=0.5,
)
HIDDEN = 4
FAILED_ROW = 1


def description(**changes) -> EngineDescription:
    fingerprint = FINGERPRINT.model_copy(update=changes)
    return EngineDescription(
        served_model_name="tiny",
        model=MODEL,
        tokenizer=TOKENIZER,
        architecture="TinyForCausalLM",
        num_layers=4,
        hidden_size=HIDDEN,
        vocab_size=1000,
        max_model_len=128,
        layer_types=("attention + mlp",) * 4,
        sites=(SiteSupport(kind="resid_post", layers=(0, 1, 2, 3), width=HIDDEN),),
        positions=("last_prompt", "all_prompt"),
        depth_bounded=True,
        fingerprint=fingerprint,
        versions={"numpy": "2", "wllm_ray": "0"},
        selftest=SELFTEST,
    )


def make_rows(
    count: int, *, failed: Sequence[int] = (), sites=("L1_resid_post",), position="last_prompt"
):
    """Rows with ids that sort wrongly as text, some in other scripts."""
    identity = CaptureIdentity(
        model_revision="a" * 40,
        tokenizer_revision="b" * 40,
        chat_template_sha256=None,
        sites=tuple(sites),
        position=position,
        capture_mode="replay",
    ).model_dump()
    return [_row(index, identity, failed=index in failed) for index in range(count)]


def _row(index: int, identity, *, failed: bool) -> RowRecord:
    row_id = ("r-{}", "行-{}", "🙂 {}", "e\u0301{}")[index % 4].format(index)
    metadata = {"label": index % 2, "n": 10**30, "x": 1.0, "text": "\ud83d\u2028"}
    content = {"prompt": f"p{index}"}
    return RowRecord(
        index=index,
        id=row_id,
        metadata_json=canonical_json(metadata).decode(),
        request_digest=request_digest(
            row_id=row_id, content=content, metadata=metadata, identity=identity
        ),
        tokens_bound=tokens_bound(content),
        token_ids=None if failed else np.arange(index, index + 2 + index % 3, dtype=np.int32),
        failure=RowFailure.of("too_long", "200 tokens, the model takes 128") if failed else None,
    )


def make_spec(rows, /, *, dataset_id="d", per_shard=3, position="last_prompt", **changes):
    sites = changes.pop("sites", ("L1_resid_post",))
    widths = changes.pop("site_widths", (HIDDEN,) * len(sites))
    shards = [rows[at : at + per_shard] for at in range(0, len(rows), per_shard)]
    fields = {
        "dataset_id": dataset_id,
        "model": MODEL,
        "tokenizer": TOKENIZER,
        "sites": sites,
        "site_widths": widths,
        "position": position,
        "capture_mode": "replay",
        "storage_dtype": "float32",
        "dtype": "float32",
        "shard_format": "npy",
        "trace": None,
        "mixed_fingerprints": False,
        "shard_layout": "stacked" if len(set(widths)) == 1 else "per_site",
        "rows": len(rows),
        "max_rows_per_shard": per_shard,
        "max_bytes_per_shard": 1 << 20,
        "shards": tuple(
            ShardSpec(
                first_row=part[0].index,
                rows=len(part),
                requests_sha256=requests_digest(row.request_digest for row in part),
            )
            for part in shards
        ),
    }
    return DatasetSpec(**(fields | changes))


def rows_of(spec, rows, shard):
    asked = spec.shards[shard]
    return rows[asked.first_row : asked.first_row + asked.rows]


def value_of(index: int, position: int = 0, site: int = 0, width: int = HIDDEN) -> np.ndarray:
    """What the fake model computes: [width] float32."""
    start = 1000.0 * (site + 1) + 10.0 * index + position
    return np.float32(start) + np.arange(width, dtype=np.float32) / 8


def site_values(rows, spec, site: int) -> np.ndarray:
    """What a dataset of these rows must hold of one site: [feature rows, width] float32."""
    width = spec.site_widths[site]
    values = [
        value_of(row.index, position, site, width)
        for row in rows
        if row.failure is None
        for position in _positions(spec.position, len(row.token_ids))
    ]
    array = np.asarray(values, dtype=np.float32).reshape(-1, width)
    if spec.dtype == "bfloat16":  # what an engine in that dtype computes
        array = (array.view(np.uint32) & 0xFFFF0000).view(np.float32)
    if (spec.storage_dtype, spec.dtype) == ("native", "float16"):
        array = array.astype(np.float16).astype(np.float32)
    return array


def _positions(position: str, tokens: int) -> Sequence[int]:
    """Where the fake model reads; what stands for one vector of a row is read at 0."""
    if position.startswith("index:"):
        return resolve(position, tokens).tolist()
    return range(feature_rows_of(position, tokens))


def features_of(row, spec) -> np.ndarray:
    """[feature rows, sum of widths] float32: the sites side by side."""
    return np.concatenate(
        [site_values([row], spec, site) for site in range(len(spec.sites))], axis=1
    )


def captured_of(spec: DatasetSpec) -> DatasetSpec:
    """The spec of what an engine is asked for: with traces, all their sites at every token."""
    if spec.trace is None:
        return spec
    fields = {"position": "all_prompt", "trace": None, "shard_layout": "per_site"}
    return spec.model_copy(update=fields | spec.trace.model_dump())


def capture(rows, spec, *, failures=None, features=None, **description_changes) -> CapturedChunk:
    """What an engine would return for these rows; ``failures`` is index → RowFailure."""
    failures = failures or {}
    spec = captured_of(spec)
    rows = [row for row in rows if row.failure is None]
    blocks = {
        row.index: (features or {}).get(row.index, features_of(row, spec))
        for row in rows
        if row.index not in failures
    }
    lengths = [len(blocks.get(row.index, ())) for row in rows]
    empty = np.empty((0, sum(spec.site_widths)), np.float32)
    return CapturedChunk(
        row_index=np.array([row.index for row in rows], np.int64),
        lengths=np.array(lengths, np.int64),
        features=np.concatenate([empty, *blocks.values()]).astype(np.float32),
        widths=spec.site_widths,
        failures=failures,
        description=description(**description_changes),
        timings={"engine": 0.25},
    )


def stage_all(store, spec, rows, **described) -> None:
    create_spec(store, spec)
    for shard in range(len(spec.shards)):
        part = rows_of(spec, rows, shard)
        stage_shard(store, spec, shard, part, [capture(part, spec, **described)])


def write_dataset(store, rows, *, described=None, **options):
    """Spec, shards and manifest in one go; returns the manifest.

    ``described`` holds changes to the engine's fingerprint.
    """
    spec = make_spec(rows, **options)
    stage_all(store, spec, rows, **(described or {}))
    return commit_manifest(store, spec.dataset_id)


def orphans(store: Store, dataset_id: str) -> list[tuple[str, int]]:
    """(name, bytes) of files in the dataset's folder that neither spec nor receipts name."""
    there = dict(store.list(folder(dataset_id)))
    receipts = read_receipts(store, load_spec(store, dataset_id), there)
    known = {spec_key(dataset_id), manifest_key(dataset_id)}
    for number, receipt in receipts.items():
        known.add(receipt_key(dataset_id, number))
        known.update(f"{folder(dataset_id)}/{entry.name}" for entry in receipt.files)
    return [(key.rpartition("/")[2], size) for key, size in there.items() if key not in known]

"""Building a dataset's spec: what is asked, and how its rows fall into shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from wllm_ray.dataset.format.dtypes import numpy_dtype, resolve_dtype
from wllm_ray.dataset.format.layout import check_dataset_id
from wllm_ray.dataset.format.manifest import DatasetSpec, ShardSpec, TraceSpec
from wllm_ray.digest import canonical_json, requests_digest, sha256_hex
from wllm_ray.errors import NotOfferedError
from wllm_ray.offered import offered_sites
from wllm_ray.offered import site_widths as offered_widths
from wllm_ray.plan import ShardLimits
from wllm_ray.positions import feature_rows_of
from wllm_ray.records import CaptureIdentity, RowOutline, RowRecord
from wllm_ray.requests import Served
from wllm_ray.schema import ShardLayout, StorageOptions

__all__ = ["build_spec"]

FLOAT32_BYTES = 4


def build_spec(
    served: Served,
    identity: CaptureIdentity,
    rows: Iterable[RowOutline | RowRecord],
    *,
    site_widths: Sequence[int],
    dataset_id: str | None,
    limits: ShardLimits,
    storage: StorageOptions,
) -> DatasetSpec:
    """The spec of a dataset.

    Args:
        served: The engine that will run it, or what a client was told of it.
        identity: What all rows have in common.
        rows: All rows, in order, or outlines of them; read once and not kept.
        site_widths: Width of each site of ``identity``.
        dataset_id: The id, or None for one made from everything else in the spec, so that the
            same request sent again finds the same dataset.
        limits: Upper bounds of one shard, where ``storage`` says nothing else.
        storage: How it is stored.

    Raises:
        InvalidInputError: The id is not one plain path component.
        NotOfferedError: Sites of different widths are to be stacked (``widths_not_representable``),
            or the engine's dtype is not stored (``storage_dtype_not_offered``).
    """
    if dataset_id is not None:
        check_dataset_id(dataset_id)
    dtype = resolve_dtype(storage.storage_dtype, served.fingerprint.engine_dtype, identity.position)
    trace = _trace_of(served) if storage.full_trace else None
    vector_bytes = numpy_dtype(dtype).itemsize * sum(site_widths)
    token_bytes = FLOAT32_BYTES * sum(trace.site_widths) if trace else 0

    def most_bytes(row: RowOutline | RowRecord) -> int:
        return vector_bytes * _most_feature_rows(identity, row) + token_bytes * row.tokens_bound

    limits = replace(limits, max_rows=storage.rows_per_shard or limits.max_rows)
    shards = tuple(_shard_specs(limits.cut((row.request_digest, most_bytes(row)) for row in rows)))
    spec = DatasetSpec(
        dataset_id=dataset_id or "unnamed",
        model=served.model,
        tokenizer=served.tokenizer,
        sites=identity.sites,
        site_widths=tuple(site_widths),
        position=identity.position,
        capture_mode=identity.capture_mode,
        storage_dtype=storage.storage_dtype,
        dtype=dtype,
        shard_format=storage.shard_format,
        shard_layout=_resolved(storage.shard_layout, identity.sites, site_widths),
        trace=trace,
        mixed_fingerprints=storage.mixed_fingerprints,
        rows=sum(shard.rows for shard in shards),
        max_rows_per_shard=limits.max_rows,
        max_bytes_per_shard=limits.max_bytes,
        shards=shards,
    )
    if dataset_id is not None:
        return spec
    body = canonical_json(spec.model_dump(mode="json", exclude={"dataset_id"}))
    return spec.model_copy(update={"dataset_id": f"ds-{sha256_hex(body)[:20]}"})


def _trace_of(served: Served) -> TraceSpec:
    """Every site that the engine offers."""
    sites = offered_sites(served)
    names = tuple(str(site) for site in sites)
    return TraceSpec(sites=names, site_widths=offered_widths(served, sites))


def _most_feature_rows(identity: CaptureIdentity, row: RowOutline | RowRecord) -> int:
    """Feature rows that a row may have, from its content alone.

    The length that the served model takes must not count: the same rows served with another limit
    would be cut elsewhere, and have another content digest.
    """
    count = feature_rows_of(identity.position, row.tokens_bound)
    return row.tokens_bound if count is None else count


def _shard_specs(shards: Iterable[list[str]]) -> Iterator[ShardSpec]:
    """What is recorded of shards, from the request digests of each one's rows."""
    first = 0
    for digests in shards:
        yield ShardSpec(
            first_row=first, rows=len(digests), requests_sha256=requests_digest(digests)
        )
        first += len(digests)


def _resolved(
    layout: ShardLayout, sites: Sequence[str], widths: Sequence[int]
) -> Literal["stacked", "per_site"]:
    equal = len(set(widths)) == 1
    if layout == "auto":
        return "stacked" if equal else "per_site"
    if layout == "stacked" and not equal:
        listed = ", ".join(f"{site} has {width}" for site, width in zip(sites, widths, strict=True))
        raise NotOfferedError(
            f"shard_layout `stacked` needs sites of one width ({listed}); ask for `per_site`, or "
            f"for `auto`, which chooses it here",
            code="widths_not_representable",
            stage="create_spec",
        )
    return layout

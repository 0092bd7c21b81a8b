"""Building a dataset's spec: what is asked, and how its rows fall into shards."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from wllm_ray.dataset.layout import check_dataset_id
from wllm_ray.dataset.manifest import DatasetSpec, ShardSpec
from wllm_ray.digest import canonical_json, rows_digest, sha256_hex
from wllm_ray.plan import ShardLimits
from wllm_ray.records import CaptureIdentity, EngineDescription
from wllm_ray.schema import ModelCard

__all__ = ["build_spec", "shard_specs"]

FLOAT32_BYTES = 4


def shard_specs(request_digests: Iterable[str], rows_per_shard: int) -> tuple[ShardSpec, ...]:
    """Cut a stream of request digests into shards, keeping one digest per shard."""
    source = iter(request_digests)
    shards: list[ShardSpec] = []
    first = 0
    while batch := list(islice(source, rows_per_shard)):
        shards.append(
            ShardSpec(first_row=first, rows=len(batch), requests_sha256=rows_digest(batch))
        )
        first += len(batch)
    return tuple(shards)


def build_spec(
    description: EngineDescription | ModelCard,
    identity: CaptureIdentity,
    request_digests: Iterable[str],
    *,
    dataset_id: str | None,
    limits: ShardLimits,
) -> DatasetSpec:
    """The spec of a dataset of one feature row per input row.

    Args:
        description: The engine that will run it, or what a client was told of it.
        identity: What all rows have in common.
        request_digests: Of all rows, in order; read once.
        dataset_id: The id, or None for one made from everything else in the spec, so that the
            same request sent again finds the same dataset.
        limits: Upper bounds of one shard.

    Raises:
        InvalidInputError: The id is not one plain path component.
    """
    if dataset_id is not None:
        check_dataset_id(dataset_id)
    row_bytes = len(identity.sites) * description.hidden_size * FLOAT32_BYTES
    shards = shard_specs(request_digests, limits.rows_per_shard(row_bytes))
    spec = DatasetSpec(
        dataset_id=dataset_id or "unnamed",
        model=description.model,
        tokenizer=description.tokenizer,
        sites=identity.sites,
        position=identity.position,
        capture_mode=identity.capture_mode,
        storage_dtype="float32",
        shard_format="npy",
        hidden_size=description.hidden_size,
        rows=sum(shard.rows for shard in shards),
        max_rows_per_shard=limits.max_rows,
        max_bytes_per_shard=limits.max_bytes,
        shards=shards,
    )
    if dataset_id is not None:
        return spec
    body = canonical_json(spec.model_dump(mode="json", exclude={"dataset_id"}))
    return spec.model_copy(update={"dataset_id": f"ds-{sha256_hex(body)[:20]}"})

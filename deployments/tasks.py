"""The Ray tasks that write: one stages a shard, one commits a dataset. Both may be retried."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray

from wllm_ray.dataset.format.manifest import DatasetSpec, Manifest
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.dataset.writing.writer import StageResult
from wllm_ray.dataset.writing.writer import commit_manifest as commit_here
from wllm_ray.dataset.writing.writer import stage_shard as stage_here
from wllm_ray.errors import StorageError
from wllm_ray.plan import Shard

__all__ = ["commit_manifest", "stage_shard"]

# Fetching from a replica's node may take a while; waiting for ever would hide a lost object.
FETCH_TIMEOUT_S = 600


@ray.remote(num_cpus=0, max_retries=3, retry_exceptions=[StorageError])  # type: ignore[untyped-decorator]
def stage_shard(root: str, spec: DatasetSpec, shard: Shard, chunks: Sequence[Any]) -> StageResult:
    """Fetch a shard's chunks from the object store, write its files, then its receipt."""
    captured = ray.get(list(chunks), timeout=FETCH_TIMEOUT_S)
    return stage_here(open_store(root), spec, shard.index, shard.rows, captured)


@ray.remote(num_cpus=0, max_retries=3, retry_exceptions=[StorageError])  # type: ignore[untyped-decorator]
def commit_manifest(root: str, dataset_id: str) -> Manifest:
    """Create the manifest from the receipts."""
    return commit_here(open_store(root), dataset_id)

"""Say what a dataset is, from its documents alone: no file of a shard is opened."""

from __future__ import annotations

from typing import Any

from wllm_ray.dataset.format.layout import folder
from wllm_ray.dataset.format.manifest import Asked, DatasetSpec, Manifest
from wllm_ray.dataset.reading.decided import is_abandoned
from wllm_ray.dataset.reading.files import open_manifest
from wllm_ray.dataset.reading.staged import expect_listed, load_spec, read_receipts
from wllm_ray.dataset.stores.store import Root, Store, open_store
from wllm_ray.errors import NotFoundError

__all__ = ["inspect_dataset"]


def inspect_dataset(root: Root, dataset_id: str) -> dict[str, Any]:
    """What a dataset holds and where it comes from, as JSON.

    ``state`` is ``committed``, or ``begun`` where there is a spec and no manifest yet; then it
    says what is staged.

    Raises:
        NotFoundError: It was neither committed nor begun here (``dataset_not_found``), or given
            up; the message says what was.
        IntegrityError: A document is not valid; or it was begun, and a file that a receipt names is
            missing or of another size.
    """
    store = open_store(root)
    try:
        manifest = open_manifest(store, dataset_id)
    except NotFoundError as not_committed:
        if is_abandoned(store, dataset_id):
            raise
        try:
            return _begun(store, load_spec(store, dataset_id))
        except NotFoundError:
            raise not_committed from None
    return _committed(manifest)


def _asked(state: str, asked: Asked) -> dict[str, Any]:
    return {
        "dataset_id": asked.dataset_id,
        "state": state,
        "model": asked.model.name,
        "revision": asked.model.revision,
        "requested_revision": asked.model.requested_revision,
        "tokenizer": asked.tokenizer.name,
        "tokenizer_revision": asked.tokenizer.revision,
        "sites": list(asked.sites),
        "site_widths": list(asked.site_widths),
        "position": asked.position,
        "capture_mode": asked.capture_mode,
        "storage_dtype": asked.storage_dtype,
        "dtype": asked.dtype,
        "shard_format": asked.shard_format,
        "shard_layout": asked.shard_layout,
        "traced_sites": list(asked.trace.sites) if asked.trace else None,
        "mixed_fingerprints": asked.mixed_fingerprints,
        "rows": asked.rows,
    }


def _committed(manifest: Manifest) -> dict[str, Any]:
    return _asked("committed", manifest) | {
        "rows_ok": manifest.rows_ok,
        "rows_failed": manifest.rows_failed,
        "axes": list(manifest.axes),
        "shape": list(manifest.shape),
        "bytes": manifest.bytes,
        "shards": len(manifest.shards),
        "content_sha256": manifest.content_sha256,
        "manifest_sha256": manifest.manifest_sha256,
        "reproducibility": manifest.reproducibility,
        "measured_relative_l2": manifest.measured_relative_l2,
        "fingerprint": manifest.fingerprint.model_dump() if manifest.fingerprint else None,
        "versions": manifest.versions,
    }


def _begun(store: Store, spec: DatasetSpec) -> dict[str, Any]:
    sizes = dict(store.list(folder(spec.dataset_id)))
    receipts = read_receipts(store, spec, sizes)
    for receipt in receipts.values():
        for entry in receipt.files:
            listed = sizes.get(f"{folder(spec.dataset_id)}/{entry.name}")
            expect_listed(store, spec.dataset_id, entry, listed)
    missing = [number for number in range(len(spec.shards)) if number not in receipts]
    return _asked("begun", spec) | {
        "shards": len(spec.shards),
        "shards_staged": len(receipts),
        "rows_staged": sum(one.rows for one in receipts.values()),
        "rows_failed": sum(one.rows_failed for one in receipts.values()),
        "bytes_staged": sum(entry.bytes for one in receipts.values() for entry in one.files),
        "missing_shards": missing,
        "next": "run the same job or merge again: it resumes here and commits",
    }

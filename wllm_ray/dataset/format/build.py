"""The manifest as a pure function of a spec and its receipts, and the digests that it carries."""

from __future__ import annotations

from typing import Literal

from wllm_ray.dataset.format.manifest import (
    Asked,
    DatasetSpec,
    Manifest,
    Measured,
    Receipt,
    ShardEntry,
    ShardSpec,
    document_bytes,
)
from wllm_ray.digest import canonical_json, sha256_hex
from wllm_ray.records import Fingerprint

__all__ = ["build_manifest", "content_digest", "manifest_digest", "reproducibility_of"]

CONTENT_FORMAT = "wllm_ray.content/1"


def build_manifest(spec: DatasetSpec, receipts: dict[int, Receipt]) -> Manifest:
    """The manifest: a pure function of a spec and the receipts of all its shards.

    The caller has checked that no receipt is missing and that all fingerprints agree where the
    spec wants that. Fingerprint, versions and self-test are those of the first shard that an
    engine worked on; shards that another replica worked on carry their own.
    """
    ordered = [receipts[number] for number in range(len(spec.shards))]
    first = next((one for one in ordered if one.fingerprint is not None), ordered[0])
    shards = tuple(
        _shard_entry(receipt, asked, first)
        for receipt, asked in zip(ordered, spec.shards, strict=True)
    )
    failed = sum(shard.rows_failed for shard in shards)
    bounds = [one.selftest.measured_relative_l2 for one in ordered if one.selftest]
    fingerprint = first.fingerprint
    manifest = Manifest(
        **{name: getattr(spec, name) for name in Asked.model_fields},
        spec_sha256=spec.sha256,
        rows_ok=spec.rows - failed,
        rows_failed=failed,
        axes=("row", "site", "hidden"),
        shape=(sum(s.feature_rows for s in shards), len(spec.sites), spec.width),
        fingerprint=fingerprint,
        reproducibility=reproducibility_of(fingerprint, shards),
        measured_relative_l2=max(bounds, default=None),
        versions=first.versions,
        selftest=first.selftest,
        shards=shards,
        content_sha256=content_digest(spec, fingerprint, shards),
        manifest_sha256="0" * 64,
    )
    return manifest.model_copy(update={"manifest_sha256": manifest_digest(manifest)})


def _shard_entry(receipt: Receipt, asked: ShardSpec, first: Receipt) -> ShardEntry:
    return ShardEntry(
        **{name: getattr(receipt, name) for name in Measured.model_fields},
        requests_sha256=asked.requests_sha256,
        receipt_sha256=sha256_hex(document_bytes(receipt)),
        fingerprint=None if receipt.fingerprint == first.fingerprint else receipt.fingerprint,
        versions=None if receipt.versions == first.versions else receipt.versions,
        selftest=None if receipt.selftest == first.selftest else receipt.selftest,
    )


def reproducibility_of(
    fingerprint: Fingerprint | None, shards: tuple[ShardEntry, ...]
) -> Literal["bitwise", "tolerance", "mixed"] | None:
    """The class of the whole dataset: that of its one fingerprint, if it has one."""
    if any(shard.fingerprint is not None for shard in shards):
        return "mixed"
    return fingerprint.reproducibility if fingerprint else None


def manifest_digest(manifest: Manifest) -> str:
    """SHA-256 over the manifest without its own digest."""
    return sha256_hex(canonical_json(manifest.model_dump(exclude={"manifest_sha256"})))


def content_digest(
    spec: DatasetSpec, fingerprint: Fingerprint | None, shards: tuple[ShardEntry, ...]
) -> str:
    """What was asked and what was measured, nothing else (FORMAT.md)."""
    return sha256_hex(
        canonical_json(
            {
                "format": CONTENT_FORMAT,
                "spec": {
                    "model_revision": spec.model.revision,
                    "tokenizer_revision": spec.tokenizer.revision,
                    "sites": spec.sites,
                    "position": spec.position,
                    "storage_dtype": spec.storage_dtype,
                    "dtype": spec.dtype,
                    "shard_format": spec.shard_format,
                    "shard_layout": spec.shard_layout,
                    "max_rows_per_shard": spec.max_rows_per_shard,
                    "max_bytes_per_shard": spec.max_bytes_per_shard,
                },
                "fingerprint": fingerprint.model_dump() if fingerprint else None,
                "shards": [
                    {
                        "first_row": shard.first_row,
                        "rows": shard.rows,
                        "rows_sha256": shard.rows_sha256,
                        "features_sha256": [one.sha256 for one in shard.features_files],
                        "fingerprint": (
                            shard.fingerprint.model_dump() if shard.fingerprint else None
                        ),
                    }
                    for shard in shards
                ],
            }
        )
    )

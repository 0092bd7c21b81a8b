"""The three documents of a dataset: spec, receipt, manifest. FORMAT.md says what each key means.

All are stored as canonical JSON; :mod:`.documents` reads them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints, model_validator

from wllm_ray.digest import canonical_json, sha256_hex
from wllm_ray.records import (
    Fingerprint,
    ModelIdentity,
    Record,
    SelfTestReport,
    TokenizerIdentity,
)
from wllm_ray.schema import DATASET_ID_PATTERN
from wllm_ray.sites import parse_site

__all__ = [
    "FORMAT_VERSION",
    "DatasetSpec",
    "FileEntry",
    "Manifest",
    "Receipt",
    "ShardEntry",
    "ShardSpec",
    "build_manifest",
    "content_digest",
    "document_bytes",
    "manifest_digest",
    "spec_digest",
]

FORMAT_VERSION = 1
CONTENT_FORMAT = "wllm_ray.content/1"

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
DatasetId = Annotated[str, StringConstraints(pattern=DATASET_ID_PATTERN)]


class ShardSpec(Record):
    """Which rows a shard holds, and the digest of what was asked in them."""

    first_row: Count
    rows: Positive
    requests_sha256: Sha256


class _Asked(Record):
    """What a dataset was asked to be; shared by spec and manifest."""

    dataset_id: DatasetId
    model: ModelIdentity
    tokenizer: TokenizerIdentity
    sites: Annotated[tuple[str, ...], Field(min_length=1)]
    position: Annotated[str, Field(min_length=1)]
    capture_mode: Annotated[str, Field(min_length=1)]
    storage_dtype: Literal["float32"]
    shard_format: Literal["npy"]
    hidden_size: Positive
    rows: Positive
    max_rows_per_shard: Positive
    max_bytes_per_shard: Positive

    @model_validator(mode="after")
    def _canonical_sites(self) -> _Asked:
        if len(set(self.sites)) != len(self.sites):
            raise ValueError("a hook site is listed twice")
        if any(str(parse_site(site)) != site for site in self.sites):
            raise ValueError("a hook site is not in its canonical form")
        return self


class DatasetSpec(_Asked):
    """What was asked: stored first, create-only, as ``spec.json``."""

    format: Literal["wllm_ray.spec"] = "wllm_ray.spec"
    format_version: Literal[1] = 1
    shards: Annotated[tuple[ShardSpec, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _shards_tile_rows(self) -> DatasetSpec:
        expected = 0
        for number, shard in enumerate(self.shards):
            if shard.first_row != expected:
                raise ValueError(f"shard {number} begins at {shard.first_row}, not {expected}")
            if shard.rows > self.max_rows_per_shard:
                raise ValueError(f"shard {number} has more rows than max_rows_per_shard")
            expected += shard.rows
        if expected != self.rows:
            raise ValueError(f"the shards hold {expected} rows, not {self.rows}")
        return self


class FileEntry(Record):
    """One file of a shard. ``shape`` and ``dtype`` belong to the features file only."""

    name: str
    role: Literal["features", "rows"]
    bytes: Count
    sha256: Sha256
    shape: tuple[Count, ...] | None
    dtype: str | None


class _Measured(Record):
    """What is in a shard; shared by receipt and manifest."""

    shard: Count
    first_row: Count
    rows: Positive
    rows_failed: Count
    feature_rows: Count
    files: tuple[FileEntry, ...]
    rows_sha256: Sha256
    recaptured: Count
    timings: dict[str, float]

    def file(self, role: str) -> FileEntry:
        """The shard's file with this role."""
        return next(entry for entry in self.files if entry.role == role)


class Receipt(_Measured):
    """Says that a shard is whole: stored last of its files, create-only.

    ``fingerprint`` and ``selftest`` are None, and ``versions`` is empty, where no row of the shard
    reached an engine.
    """

    format: Literal["wllm_ray.receipt"] = "wllm_ray.receipt"
    format_version: Literal[1] = 1
    spec_sha256: Sha256
    fingerprint: Fingerprint | None
    versions: dict[str, str]
    selftest: SelfTestReport | None


class ShardEntry(_Measured):
    """What the manifest says of a shard.

    ``versions`` and ``selftest`` are None where they equal the manifest's own.
    """

    requests_sha256: Sha256
    receipt_sha256: Sha256
    versions: dict[str, str] | None
    selftest: SelfTestReport | None


class Manifest(_Asked):
    """Makes the dataset exist: stored once, create-only, a pure function of spec and receipts."""

    format: Literal["wllm_ray.manifest"] = "wllm_ray.manifest"
    format_version: Literal[1] = 1
    spec_sha256: Sha256
    rows_ok: Count
    rows_failed: Count
    axes: tuple[Literal["row"], Literal["site"], Literal["hidden"]]
    shape: tuple[Count, Positive, Positive]
    dtype: Literal["float32"]
    fingerprint: Fingerprint | None
    reproducibility: Literal["bitwise", "tolerance"] | None
    measured_relative_l2: float | None
    versions: dict[str, str]
    selftest: SelfTestReport | None
    shards: tuple[ShardEntry, ...]
    content_sha256: Sha256
    manifest_sha256: Sha256

    @property
    def feature_rows(self) -> int:
        """How many feature rows all shards hold."""
        return self.shape[0]

    @property
    def bytes(self) -> int:
        """Bytes of all shard files."""
        return sum(entry.bytes for shard in self.shards for entry in shard.files)

    def spec(self) -> DatasetSpec:
        """The spec that the manifest was made from.

        Raises:
            pydantic.ValidationError: The shards do not tile the rows.
        """
        shards = [
            ShardSpec(first_row=s.first_row, rows=s.rows, requests_sha256=s.requests_sha256)
            for s in self.shards
        ]
        asked = {name: getattr(self, name) for name in _Asked.model_fields}
        return DatasetSpec(**asked, shards=tuple(shards))


def document_bytes(document: Record) -> bytes:
    """A document as it is stored."""
    return canonical_json(document.model_dump())


def spec_digest(spec: DatasetSpec) -> str:
    """SHA-256 over the spec's stored bytes."""
    return sha256_hex(document_bytes(spec))


def build_manifest(spec: DatasetSpec, receipts: dict[int, Receipt]) -> Manifest:
    """The manifest: a pure function of a spec and the receipts of all its shards.

    The caller has checked that no receipt is missing and that all fingerprints agree. Versions
    and self-test are those of the first shard that an engine worked on; shards that another
    replica worked on carry their own.
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
        **{name: getattr(spec, name) for name in _Asked.model_fields},
        spec_sha256=spec_digest(spec),
        rows_ok=spec.rows - failed,
        rows_failed=failed,
        axes=("row", "site", "hidden"),
        shape=(sum(s.feature_rows for s in shards), len(spec.sites), spec.hidden_size),
        dtype=spec.storage_dtype,
        fingerprint=fingerprint,
        reproducibility=fingerprint.reproducibility if fingerprint else None,
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
        **{name: getattr(receipt, name) for name in _Measured.model_fields},
        requests_sha256=asked.requests_sha256,
        receipt_sha256=sha256_hex(document_bytes(receipt)),
        versions=None if receipt.versions == first.versions else receipt.versions,
        selftest=None if receipt.selftest == first.selftest else receipt.selftest,
    )


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
                    "shard_format": spec.shard_format,
                    "max_rows_per_shard": spec.max_rows_per_shard,
                    "max_bytes_per_shard": spec.max_bytes_per_shard,
                },
                "fingerprint": fingerprint.model_dump() if fingerprint else None,
                "shards": [
                    {
                        "first_row": shard.first_row,
                        "rows": shard.rows,
                        "rows_sha256": shard.rows_sha256,
                        "features_sha256": [
                            entry.sha256 for entry in shard.files if entry.role == "features"
                        ],
                    }
                    for shard in shards
                ],
            }
        )
    )

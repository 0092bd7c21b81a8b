"""The three documents of a dataset: spec, receipt, manifest. FORMAT.md says what each key means.

All are stored as canonical JSON; :mod:`.documents` reads them, :mod:`.build` makes the manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, StringConstraints, model_validator

from wllm_ray.dataset.format.dtypes import Dtype
from wllm_ray.digest import canonical_json, sha256_hex
from wllm_ray.lazy import lazy
from wllm_ray.positions import canonical_position
from wllm_ray.records import (
    Fingerprint,
    ModelIdentity,
    Record,
    SelfTestReport,
    TokenizerIdentity,
)
from wllm_ray.schema import DATASET_ID_PATTERN, ShardFormat, StorageDtype
from wllm_ray.sites import parse_site

__all__ = [
    "FORMAT_VERSION",
    "Asked",
    "DatasetSpec",
    "FeatureArray",
    "FileEntry",
    "Manifest",
    "Measured",
    "Receipt",
    "ShardEntry",
    "ShardSpec",
    "TraceSpec",
    "document_bytes",
]

FORMAT_VERSION = 1

# What Arrow and NumPy count with.
_MOST = 2**63 - 1
Count = Annotated[int, Field(ge=0, le=_MOST)]
Positive = Annotated[int, Field(ge=1, le=_MOST)]
# Arrow's fixed-size lists have 32-bit lengths.
Width = Annotated[int, Field(ge=1, le=2**31 - 1)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
DatasetId = Annotated[str, StringConstraints(pattern=DATASET_ID_PATTERN)]


class ShardSpec(Record):
    """Which rows a shard holds, and the digest of what was asked in them."""

    first_row: Count
    rows: Positive
    requests_sha256: Sha256


class FeatureArray(NamedTuple):
    """An array that every shard has, in a features file of its own.

    Attributes:
        site: The site that it is of, or None where it holds all of them.
        columns: Its part of a feature row in which all sites lie side by side.
        axes: The shape of one feature row: (D,) of one site, (L, D) of all.
    """

    site: str | None
    columns: slice
    axes: tuple[int, ...]


class TraceSpec(Record):
    """What the traces hold of every token of every good row: these sites, each so wide."""

    sites: Annotated[tuple[str, ...], Field(min_length=1)]
    site_widths: tuple[Width, ...]

    @model_validator(mode="after")
    def _canonical_sites(self) -> TraceSpec:
        _check_sites(self.sites, self.site_widths)
        return self


class Asked(Record):
    """What a dataset was asked to be; shared by spec and manifest.

    ``storage_dtype`` is what was asked for, ``dtype`` what that is here: ``native`` depends on
    the engine. ``mixed_fingerprints`` says whether shards may come from engines that may differ
    numerically.
    """

    dataset_id: DatasetId
    model: ModelIdentity
    tokenizer: TokenizerIdentity
    sites: Annotated[tuple[str, ...], Field(min_length=1)]
    site_widths: tuple[Width, ...]
    position: Annotated[str, Field(min_length=1)]
    capture_mode: Annotated[str, Field(min_length=1)]
    storage_dtype: StorageDtype
    dtype: Dtype
    shard_format: ShardFormat
    shard_layout: Literal["stacked", "per_site"]
    trace: TraceSpec | None
    mixed_fingerprints: bool
    rows: Positive
    max_rows_per_shard: Positive
    max_bytes_per_shard: Positive

    @model_validator(mode="after")
    def _canonical_sites(self) -> Asked:
        _check_sites(self.sites, self.site_widths)
        if self.shard_layout == "stacked" and self.width is None:
            raise ValueError("sites of different widths cannot be stacked")
        if self.storage_dtype not in ("native", self.dtype):
            raise ValueError(f"storage_dtype {self.storage_dtype} is not stored as {self.dtype}")
        if self.trace is not None:
            traced = set(zip(self.trace.sites, self.trace.site_widths, strict=True))
            if not traced.issuperset(zip(self.sites, self.site_widths, strict=True)):
                raise ValueError("a hook site of the dataset is not among those of its traces")
        return self

    @model_validator(mode="after")
    def _canonical_position(self) -> Asked:
        if canonical_position(self.position) != self.position:
            raise ValueError("the position is not in its canonical form")
        return self

    @property
    def width(self) -> int | None:
        """The width that all sites have, or None where they differ."""
        return self.site_widths[0] if len(set(self.site_widths)) == 1 else None

    @property
    def arrays(self) -> tuple[FeatureArray, ...]:
        """The arrays of every shard, in the order of their files."""
        ends = tuple(accumulate(self.site_widths))
        if self.shard_layout == "stacked":
            axes = (len(self.sites), self.site_widths[0])
            return (FeatureArray(None, slice(0, ends[-1]), axes),)
        parts = zip(self.sites, self.site_widths, ends, strict=True)
        return tuple(FeatureArray(site, slice(end - n, end), (n,)) for site, n, end in parts)


def _check_sites(sites: tuple[str, ...], widths: tuple[int, ...]) -> None:
    if len(set(sites)) != len(sites):
        raise ValueError("a hook site is listed twice")
    if any(str(parse_site(site)) != site for site in sites):
        raise ValueError("a hook site is not in its canonical form")
    if len(widths) != len(sites):
        raise ValueError("site_widths is not one width for each site")


class DatasetSpec(Asked):
    """What was asked: stored first, create-only, as ``spec.json``."""

    @lazy
    def sha256(self) -> str:
        """The spec digest. Kept: every receipt names it, and a spec may have many shards."""
        return sha256_hex(document_bytes(self))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """As pydantic's; the copy has a digest of its own."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("sha256", None)
        return copied

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
    """One file of a shard. ``shape`` and ``dtype`` belong to features files only.

    ``site`` is the one that the file holds alone, else None. ``dtype`` is NumPy's name of it.
    """

    name: str
    role: Literal["features", "rows", "trace"]
    site: str | None
    bytes: Count
    sha256: Sha256
    shape: tuple[Count, ...] | None
    dtype: str | None


class Measured(Record):
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

    @property
    def features_files(self) -> tuple[FileEntry, ...]:
        """The files of the arrays, in their order."""
        return tuple(entry for entry in self.files if entry.role == "features")

    @property
    def rows_file(self) -> FileEntry:
        """The file of the rows table."""
        return next(entry for entry in self.files if entry.role == "rows")

    @property
    def trace_file(self) -> FileEntry | None:
        """The file of the traces, where there are any."""
        return next((entry for entry in self.files if entry.role == "trace"), None)


class Receipt(Measured):
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


class ShardEntry(Measured):
    """What the manifest says of a shard.

    ``fingerprint``, ``versions`` and ``selftest`` are None where they equal the manifest's own,
    and the first also where no row of the shard reached an engine.
    """

    requests_sha256: Sha256
    receipt_sha256: Sha256
    fingerprint: Fingerprint | None
    versions: dict[str, str] | None
    selftest: SelfTestReport | None


class Manifest(Asked):
    """Makes the dataset exist: stored once, create-only, a pure function of spec and receipts.

    ``reproducibility`` is ``mixed`` where shards have unlike fingerprints; then no bound between
    them was measured, and ``measured_relative_l2`` is that of the engines, each for itself.
    """

    format: Literal["wllm_ray.manifest"] = "wllm_ray.manifest"
    format_version: Literal[1] = 1
    spec_sha256: Sha256
    rows_ok: Count
    rows_failed: Count
    axes: tuple[Literal["row"], Literal["site"], Literal["hidden"]]
    shape: tuple[Count, Positive, Positive | None]
    fingerprint: Fingerprint | None
    reproducibility: Literal["bitwise", "tolerance", "mixed"] | None
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
        asked = {name: getattr(self, name) for name in Asked.model_fields}
        return DatasetSpec(**asked, shards=tuple(shards))


def document_bytes(document: Record) -> bytes:
    """A document as it is stored."""
    return canonical_json(document.model_dump())

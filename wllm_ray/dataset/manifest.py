"""The three documents of a dataset: spec, receipt, manifest. FORMAT.md says what each key means.

All are canonical JSON. Reading is strict and in this order: JSON, format and version, canonical
form, keys and types, the document's own digest, then every count, range and order against every
other. What :func:`read_manifest` returns has no contradiction left in it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, StringConstraints, ValidationError, model_validator

from wllm_ray.dataset.layout import FEATURES_SUFFIX, ROWS_SUFFIX, file_name
from wllm_ray.dataset.shard import NPY_DTYPE, npy_bytes
from wllm_ray.digest import canonical_json, parse_json, sha256_hex
from wllm_ray.errors import IntegrityError, InvalidInputError
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
    "document_bytes",
    "read_manifest",
    "read_receipt",
    "read_spec",
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


AnyDocument = TypeVar("AnyDocument", DatasetSpec, Receipt, Manifest)


def document_bytes(document: Record) -> bytes:
    """A document as it is stored."""
    return canonical_json(document.model_dump())


def spec_digest(spec: DatasetSpec) -> str:
    """SHA-256 over the spec's stored bytes."""
    return sha256_hex(document_bytes(spec))


def read_spec(data: bytes) -> DatasetSpec:
    """Read ``spec.json``.

    Raises:
        IntegrityError: Codes ``manifest_invalid`` and ``format_unknown``.
    """
    return _read(data, DatasetSpec)


def read_receipt(data: bytes, spec: DatasetSpec, shard: int) -> Receipt:
    """Read one receipt and check it against the spec it belongs to.

    Raises:
        IntegrityError: ``manifest_invalid``, ``format_unknown``, ``digest_mismatch`` (another
            spec), ``name_invalid``, ``array_invalid`` or ``rows_inconsistent``.
    """
    receipt = _read(data, Receipt)
    where = f"the receipt of shard {shard}"
    if receipt.spec_sha256 != spec_digest(spec):
        raise IntegrityError(
            f"{where} was written for another spec (expected SHA-256 {spec_digest(spec)}, found "
            f"{receipt.spec_sha256}); the folder mixes two datasets, use another dataset id",
            code="digest_mismatch",
        )
    asked = spec.shards[shard]
    expected = (shard, asked.first_row, asked.rows)
    found = (receipt.shard, receipt.first_row, receipt.rows)
    if found != expected:
        _inconsistent(f"{where}: expected (shard, first row, rows) {expected}, found {found}")
    _check_measured(receipt, len(spec.sites), spec.hidden_size)
    return receipt


def read_manifest(data: bytes) -> Manifest:
    """Read ``manifest.json`` and prove that nothing in it contradicts anything else.

    Raises:
        IntegrityError: ``manifest_invalid``, ``format_unknown``, ``digest_mismatch``,
            ``name_invalid``, ``array_invalid`` or ``rows_inconsistent``.
    """
    manifest = _read(data, Manifest)
    _expect_digest("manifest_sha256", manifest.manifest_sha256, _manifest_digest(manifest))
    _check_counts(manifest)
    for shard in manifest.shards:
        _check_measured(shard, len(manifest.sites), manifest.hidden_size)
    try:
        spec = manifest.spec()
    except ValidationError as error:
        raise _invalid("wllm_ray.manifest", error) from None
    _expect_digest("spec_sha256", manifest.spec_sha256, spec_digest(spec))
    content = _content_digest(spec, manifest.fingerprint, manifest.shards)
    _expect_digest("content_sha256", manifest.content_sha256, content)
    return manifest


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
        content_sha256=_content_digest(spec, fingerprint, shards),
        manifest_sha256="0" * 64,
    )
    return manifest.model_copy(update={"manifest_sha256": _manifest_digest(manifest)})


def _shard_entry(receipt: Receipt, asked: ShardSpec, first: Receipt) -> ShardEntry:
    return ShardEntry(
        **{name: getattr(receipt, name) for name in _Measured.model_fields},
        requests_sha256=asked.requests_sha256,
        receipt_sha256=sha256_hex(document_bytes(receipt)),
        versions=None if receipt.versions == first.versions else receipt.versions,
        selftest=None if receipt.selftest == first.selftest else receipt.selftest,
    )


def _manifest_digest(manifest: Manifest) -> str:
    return sha256_hex(canonical_json(manifest.model_dump(exclude={"manifest_sha256"})))


def _content_digest(
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


def _read(data: bytes, kind: type[AnyDocument]) -> AnyDocument:
    name = kind.model_fields["format"].default
    try:
        value = parse_json(data)
    except InvalidInputError as error:
        raise IntegrityError(
            f"expected a {name} document, found bytes that are {error.message}",
            code="manifest_invalid",
        ) from None
    _check_format(value, name)
    if canonical_json(value) != data:
        raise IntegrityError(
            f"the {name} document is not in canonical form, so it was edited or re-saved; "
            f"restore the original",
            code="manifest_invalid",
        )
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise _invalid(name, error) from None


def _check_format(value: Any, name: str) -> None:
    if not isinstance(value, dict):
        raise IntegrityError(
            f"expected a {name} object, found {type(value).__name__}", code="manifest_invalid"
        )
    found = (value.get("format"), value.get("format_version"))
    if found != (name, FORMAT_VERSION) or isinstance(found[1], bool):
        raise IntegrityError(
            f"expected format {name!r} version {FORMAT_VERSION}, found {found[0]!r} version "
            f"{found[1]!r}; a newer wllm_ray may read it",
            code="format_unknown",
        )


def _invalid(name: str, error: ValidationError) -> IntegrityError:
    problems = [
        f"{'.'.join(map(str, one['loc'])) or 'document'}: {one['msg']}"
        for one in error.errors(include_url=False, include_input=False, include_context=False)
    ]
    return IntegrityError(
        f"the {name} document is not valid: {'; '.join(problems[:5])}",
        code="manifest_invalid",
        details={"problems": problems},
    )


def _expect_digest(name: str, found: str, expected: str) -> None:
    if found != expected:
        raise IntegrityError(
            f"{name} is {found}, but the document's own content gives {expected}; the manifest "
            f"was edited, restore the original",
            code="digest_mismatch",
        )


def _check_counts(manifest: Manifest) -> None:
    expected = {
        "shape": (
            sum(s.feature_rows for s in manifest.shards),
            len(manifest.sites),
            manifest.hidden_size,
        ),
        "rows": sum(s.rows for s in manifest.shards),
        "rows_failed": sum(s.rows_failed for s in manifest.shards),
        "rows_ok": sum(s.rows - s.rows_failed for s in manifest.shards),
    }
    for name, value in expected.items():
        if getattr(manifest, name) != value:
            _inconsistent(f"manifest {name} is {getattr(manifest, name)}, its shards give {value}")
    numbers = [shard.shard for shard in manifest.shards]
    if numbers != list(range(len(numbers))):
        _inconsistent(f"shards are numbered {numbers[:5]}…, not from 0 in order")
    expected_class = manifest.fingerprint.reproducibility if manifest.fingerprint else None
    if manifest.reproducibility != expected_class:
        _inconsistent("reproducibility differs from the fingerprint's")


def _check_measured(measured: Receipt | ShardEntry, sites: int, hidden: int) -> None:
    """Counts, names, shapes and sizes of one shard against each other."""
    where = f"shard {measured.shard}"
    good = measured.rows - measured.rows_failed
    if good < 0 or measured.feature_rows < good or (good == 0) != (measured.feature_rows == 0):
        _inconsistent(
            f"{where}: {measured.rows_failed} of {measured.rows} rows failed, but there are "
            f"{measured.feature_rows} feature rows"
        )
    if [entry.role for entry in measured.files] != ["features", "rows"]:
        raise IntegrityError(
            f"{where}: expected one features file and one rows file, in this order",
            code="manifest_invalid",
        )
    for entry, suffix in zip(measured.files, (FEATURES_SUFFIX, ROWS_SUFFIX), strict=True):
        _check_name(entry, measured.shard, suffix)
    _check_features_entry(measured, (measured.feature_rows, sites, hidden))


def _check_name(entry: FileEntry, shard: int, suffix: str) -> None:
    expected = file_name(shard, entry.sha256, suffix)
    if entry.name != expected:
        raise IntegrityError(
            f"shard {shard}: expected the plain file name {expected}, found {entry.name!a}",
            code="name_invalid",
        )


def _check_features_entry(measured: Receipt | ShardEntry, shape: tuple[int, int, int]) -> None:
    features, rows = measured.files
    if features.shape != shape or features.dtype != NPY_DTYPE:
        raise IntegrityError(
            f"shard {measured.shard}: expected features of shape {shape} and dtype {NPY_DTYPE}, "
            f"found {features.shape} and {features.dtype!a}",
            code="array_invalid",
        )
    if features.bytes != npy_bytes(shape):
        raise IntegrityError(
            f"shard {measured.shard}: features of shape {shape} take {npy_bytes(shape)} bytes, "
            f"but {features.bytes} are recorded",
            code="size_mismatch",
        )
    if rows.shape is not None or rows.dtype is not None:
        _inconsistent(f"shard {measured.shard}: the rows file has neither shape nor dtype")


def _inconsistent(message: str) -> None:
    raise IntegrityError(message, code="rows_inconsistent")

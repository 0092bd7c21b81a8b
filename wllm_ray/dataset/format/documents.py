"""Read the three documents of a dataset, believing nothing.

In this order: JSON, format and version, canonical form, keys and types, the document's own
digest, then every count, range, name and order against every other. What :func:`read_manifest`
returns has no contradiction left in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from pydantic import ValidationError

from wllm_ray.dataset.format.build import content_digest, manifest_digest, reproducibility_of
from wllm_ray.dataset.format.dtypes import numpy_dtype, resolve_dtype
from wllm_ray.dataset.format.features import features_bytes
from wllm_ray.dataset.format.layout import ROWS_SUFFIX, TRACE_SUFFIX, features_suffix, file_name
from wllm_ray.dataset.format.manifest import (
    FORMAT_VERSION,
    Asked,
    DatasetSpec,
    FeatureArray,
    FileEntry,
    Manifest,
    Measured,
    Receipt,
)
from wllm_ray.digest import canonical_json, parse_json
from wllm_ray.errors import IntegrityError, InvalidInputError
from wllm_ray.records import Fingerprint

__all__ = ["MAX_DOCUMENT_BYTES", "read_manifest", "read_receipt", "read_spec"]

# Some hundred thousand shards; what is larger is not read.
MAX_DOCUMENT_BYTES = 512 << 20

# Characters of a foreign text in a message.
_SHOWN = 200

AnyDocument = TypeVar("AnyDocument", DatasetSpec, Receipt, Manifest)


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
    if receipt.spec_sha256 != spec.sha256:
        raise IntegrityError(
            f"{where} was written for another spec (expected SHA-256 {spec.sha256}, found "
            f"{receipt.spec_sha256}); the folder mixes two datasets, use another dataset id",
            code="digest_mismatch",
        )
    asked = spec.shards[shard]
    expected = (shard, asked.first_row, asked.rows)
    found = (receipt.shard, receipt.first_row, receipt.rows)
    if found != expected:
        _inconsistent(f"{where}: expected (shard, first row, rows) {expected}, found {found}")
    _check_fingerprint(spec, receipt.fingerprint)
    _check_measured(receipt, spec)
    return receipt


def read_manifest(data: bytes) -> Manifest:
    """Read ``manifest.json`` and prove that nothing in it contradicts anything else.

    Raises:
        IntegrityError: ``manifest_invalid``, ``format_unknown``, ``digest_mismatch``,
            ``name_invalid``, ``array_invalid`` or ``rows_inconsistent``.
    """
    manifest = _read(data, Manifest)
    _expect_digest("manifest_sha256", manifest.manifest_sha256, manifest_digest(manifest))
    _check_counts(manifest)
    for shard in manifest.shards:
        _check_measured(shard, manifest)
    try:
        spec = manifest.spec()
    except ValidationError as error:
        raise _invalid("wllm_ray.manifest", error) from None
    _expect_digest("spec_sha256", manifest.spec_sha256, spec.sha256)
    content = content_digest(spec, manifest.fingerprint, manifest.shards)
    _expect_digest("content_sha256", manifest.content_sha256, content)
    return manifest


def _read(data: bytes, kind: type[AnyDocument]) -> AnyDocument:
    name = kind.model_fields["format"].default
    try:
        value = parse_json(data)
        is_canonical = canonical_json(value) == data
    except (InvalidInputError, RecursionError) as error:
        found = "nested too deeply" if isinstance(error, RecursionError) else error.message
        raise IntegrityError(
            f"expected a {name} document, found bytes that are {found}", code="manifest_invalid"
        ) from None
    _check_format(value, name)
    if not is_canonical:
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
    if found != (name, FORMAT_VERSION) or type(found[1]) is not int:
        kind, version = map(_shown, found)
        raise IntegrityError(
            f"expected format {name!r} version {FORMAT_VERSION}, found {kind} version {version}; "
            f"a newer wllm_ray may read it",
            code="format_unknown",
        )


def _shown(value: Any) -> str:
    """A value that anybody may have written, at a length that one can read."""
    if isinstance(value, float) or (isinstance(value, int) and value.bit_length() <= _SHOWN):
        return repr(value)
    return f"{value!a:.{_SHOWN}}" if isinstance(value, str) else f"some {type(value).__name__}"


def _invalid(name: str, error: ValidationError) -> IntegrityError:
    problems = [
        f"{'.'.join(map(str, one['loc'])) or 'document':.{_SHOWN}}: {one['msg']:.{_SHOWN}}"
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
            manifest.width,
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
    if manifest.reproducibility != reproducibility_of(manifest.fingerprint, manifest.shards):
        _inconsistent("reproducibility differs from the fingerprint's")
    for fingerprint in (manifest.fingerprint, *(shard.fingerprint for shard in manifest.shards)):
        _check_fingerprint(manifest, fingerprint)
    if manifest.reproducibility == "mixed" and not manifest.mixed_fingerprints:
        _inconsistent("shards have unlike fingerprints, which was not asked for")


def _check_fingerprint(asked: Asked, fingerprint: Fingerprint | None) -> None:
    """The engine ran the model, tokenizer and dtype that the dataset is of."""
    if fingerprint is None:
        return
    expected = (asked.model.revision, asked.tokenizer.revision)
    found = (fingerprint.model_revision, fingerprint.tokenizer_revision)
    if found != expected:
        _inconsistent(f"model and tokenizer are {expected}, but the engine ran {found}")
    engine = fingerprint.engine_dtype
    if resolve_dtype(asked.storage_dtype, engine, asked.position) != asked.dtype:
        _inconsistent(
            f"dtype is {asked.dtype}, which storage_dtype {asked.storage_dtype} of an engine in "
            f"{engine} is not"
        )


def _check_measured(measured: Measured, asked: Asked) -> None:
    """Counts, names, shapes and sizes of one shard against each other."""
    where = f"shard {measured.shard}"
    good = measured.rows - measured.rows_failed
    if good < 0 or measured.feature_rows < good or (good == 0) != (measured.feature_rows == 0):
        _inconsistent(
            f"{where}: {measured.rows_failed} of {measured.rows} rows failed, but there are "
            f"{measured.feature_rows} feature rows"
        )
    expected = [*(("features", array.site) for array in asked.arrays), ("rows", None)]
    expected += [("trace", None)] if asked.trace else []
    found = [(entry.role, entry.site) for entry in measured.files]
    if found != expected:
        raise IntegrityError(
            f"{where}: layout {asked.shard_layout} has the files {_listed(expected)}, in this "
            f"order; found {_listed(found)}",
            code="manifest_invalid",
        )
    for array, entry in zip(asked.arrays, measured.features_files, strict=True):
        _check_name(entry, measured.shard, features_suffix(array.site, asked.shard_format))
        _check_features_entry(entry, measured, asked, array)
    for role, suffix in (("rows", ROWS_SUFFIX), ("trace", TRACE_SUFFIX)):
        for entry in (one for one in measured.files if one.role == role):
            _check_name(entry, measured.shard, suffix)
            if entry.shape is not None or entry.dtype is not None:
                _inconsistent(f"{where}: the {role} file has neither shape nor dtype")


def _listed(files: Sequence[tuple[str, str | None]]) -> str:
    return ", ".join(role if site is None else f"{role} of {site!a}" for role, site in files)


def _check_name(entry: FileEntry, shard: int, suffix: str) -> None:
    expected = file_name(shard, entry.sha256, suffix)
    if entry.name != expected:
        raise IntegrityError(
            f"shard {shard}: expected the plain file name {expected}, found {_shown(entry.name)}",
            code="name_invalid",
        )


def _check_features_entry(
    entry: FileEntry, measured: Measured, asked: Asked, array: FeatureArray
) -> None:
    shape = (measured.feature_rows, *array.axes)
    dtype = numpy_dtype(asked.dtype).str
    if entry.shape != shape or entry.dtype != dtype:
        raise IntegrityError(
            f"shard {measured.shard}: expected features of shape {shape} and dtype {dtype}, "
            f"found {entry.shape} and {entry.dtype!a}",
            code="array_invalid",
        )
    sizes = features_bytes(asked, array, measured.feature_rows)
    if entry.bytes not in sizes:
        raise IntegrityError(
            f"shard {measured.shard}: features of shape {shape} take {sizes.start} bytes, "
            f"but {entry.bytes} are recorded",
            code="size_mismatch",
        )


def _inconsistent(message: str) -> None:
    raise IntegrityError(message, code="rows_inconsistent")

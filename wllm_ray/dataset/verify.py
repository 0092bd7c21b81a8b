"""Check a committed dataset from end to end, and say what it is.

Loading stops at the first fault; this goes on and lists them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from wllm_ray.dataset.files import DatasetFiles, open_manifest
from wllm_ray.dataset.layout import (
    MANIFEST_NAME,
    SPEC_NAME,
    folder,
    receipt_key,
    spec_key,
)
from wllm_ray.dataset.manifest import Manifest, ShardEntry, document_bytes
from wllm_ray.dataset.rowtable import check_rows
from wllm_ray.dataset.staged import orphans
from wllm_ray.dataset.store import Root, Store, open_store
from wllm_ray.digest import parse_json, sha256_hex
from wllm_ray.errors import IntegrityError, NotFoundError, WLLMError

__all__ = ["Fault", "VerifyReport", "inspect_dataset", "verify_dataset", "verify_files"]

_RESTORE = (
    "the dataset is not what was committed; restore it from a copy, or capture it again under "
    "another dataset id"
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is not what its record says."""

    code: str
    file: str
    message: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Everything that was found.

    Attributes:
        dataset_id: Which dataset.
        faults: All of them, in the order of the files.
        notes: What is no fault: files that no record names.
        files: How many files were checked.
        bytes: Their sizes together.
        advice: What to do about the faults; empty where there are none.
    """

    dataset_id: str
    faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    files: int
    bytes: int
    advice: str

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.faults

    def raise_first(self) -> None:
        """Raise the first fault, if there is one.

        Raises:
            IntegrityError: With the fault's code and file.
        """
        for fault in self.faults:
            raise IntegrityError(
                f"{fault.file}: {fault.message}", code=fault.code, details={"file": fault.file}
            )

    def to_json(self) -> dict[str, Any]:
        """The report for programs."""
        return {
            "dataset_id": self.dataset_id,
            "ok": self.ok,
            "faults": [
                {"code": one.code, "file": one.file, "message": one.message} for one in self.faults
            ],
            "notes": list(self.notes),
            "files": self.files,
            "bytes": self.bytes,
        }


@dataclass(slots=True)
class _Findings:
    faults: list[Fault] = field(default_factory=list)

    def run(self, file: str, check: Callable[[], object]) -> bool:
        """Run one check; what it raises becomes a fault of this file."""
        try:
            check()
        except NotFoundError as error:
            self.faults.append(Fault("file_missing", file, error.message))
        except WLLMError as error:
            self.faults.append(Fault(error.code, file, error.message))
        else:
            return True
        return False


def verify_dataset(root: Root, dataset_id: str) -> VerifyReport:
    """Check manifest, spec, receipts, every size, digest, header, table and value.

    Raises:
        NotFoundError: It is not committed here (``dataset_not_found``).
        InvalidInputError: An id or root that cannot be (``invalid_argument``).
    """
    store = open_store(root)
    try:
        manifest = open_manifest(store, dataset_id)
    except IntegrityError as error:
        fault = Fault(error.code, MANIFEST_NAME, error.message)
        advice = _advice(dataset_id, error)
        return VerifyReport(dataset_id, (fault,), (), files=1, bytes=0, advice=advice)
    return verify_files(DatasetFiles(store, manifest, "lazy"))


def _advice(dataset_id: str, error: IntegrityError) -> str:
    """A folder that was renamed holds nothing that is damaged."""
    own = error.details.get("manifest_dataset_id")
    if own is None:
        return _RESTORE
    return (
        f"the folder is called {dataset_id!r}, but its manifest is that of {own!r}: rename "
        f"{folder(dataset_id)} back to {folder(own)} and verify that"
    )


def verify_files(files: DatasetFiles) -> VerifyReport:
    """Check everything but the manifest, which is checked already, through these files."""
    store, manifest = files.store, files.manifest
    findings = _Findings()
    findings.run(SPEC_NAME, lambda: _check_spec(store, manifest))
    seen: dict[str, int] = {}
    for shard in manifest.shards:
        _verify_shard(files, shard, findings, seen)
    return VerifyReport(
        dataset_id=manifest.dataset_id,
        faults=tuple(findings.faults),
        notes=_notes(store, manifest.dataset_id),
        files=2 + sum(1 + len(shard.files) for shard in manifest.shards),
        bytes=manifest.bytes,
        advice=_RESTORE if findings.faults else "",
    )


def inspect_dataset(root: Root, dataset_id: str) -> dict[str, Any]:
    """What a dataset is, from its manifest alone.

    Raises:
        NotFoundError: It is not committed here (``dataset_not_found``).
        IntegrityError: The manifest is not valid.
    """
    manifest = open_manifest(open_store(root), dataset_id)
    return {
        "dataset_id": manifest.dataset_id,
        "model": manifest.model.name,
        "revision": manifest.model.revision,
        "requested_revision": manifest.model.requested_revision,
        "tokenizer": manifest.tokenizer.name,
        "tokenizer_revision": manifest.tokenizer.revision,
        "sites": list(manifest.sites),
        "site_widths": list(manifest.site_widths),
        "position": manifest.position,
        "capture_mode": manifest.capture_mode,
        "rows": manifest.rows,
        "rows_ok": manifest.rows_ok,
        "rows_failed": manifest.rows_failed,
        "axes": list(manifest.axes),
        "shape": list(manifest.shape),
        "dtype": manifest.dtype,
        "bytes": manifest.bytes,
        "shards": len(manifest.shards),
        "shard_layout": manifest.shard_layout,
        "content_sha256": manifest.content_sha256,
        "manifest_sha256": manifest.manifest_sha256,
        "reproducibility": manifest.reproducibility,
        "measured_relative_l2": manifest.measured_relative_l2,
        "fingerprint": manifest.fingerprint.model_dump() if manifest.fingerprint else None,
        "versions": manifest.versions,
    }


def _check_spec(store: Store, manifest: Manifest) -> None:
    if store.get(spec_key(manifest.dataset_id)) != document_bytes(manifest.spec()):
        raise IntegrityError(
            "spec.json is not the spec that the manifest was made from", code="digest_mismatch"
        )


def _verify_shard(
    files: DatasetFiles, shard: ShardEntry, findings: _Findings, seen: dict[str, int]
) -> None:
    name = receipt_key(files.manifest.dataset_id, shard.shard)
    findings.run(name.rpartition("/")[2], lambda: _check_receipt(files.store, name, shard))
    findings.run(shard.rows_file.name, lambda: _check_table(files, shard, seen))
    for number, entry in enumerate(shard.features_files):
        findings.run(entry.name, partial(files.array, shard.shard, number))


def _check_receipt(store: Store, key: str, shard: ShardEntry) -> None:
    if sha256_hex(store.get(key)) != shard.receipt_sha256:
        raise IntegrityError(
            "the receipt is not the one that the manifest was made from", code="digest_mismatch"
        )


def _check_table(files: DatasetFiles, shard: ShardEntry, seen: dict[str, int]) -> None:
    batch = files.rows(shard.shard)
    check_rows(batch, shard)
    for text in batch.column("metadata").to_pylist():
        parse_json(text)
    for row, row_id in enumerate(batch.column("id").to_pylist(), shard.first_row):
        if seen.setdefault(row_id, row) != row:
            raise IntegrityError(
                f"rows {seen[row_id]} and {row} have the same id", code="rows_inconsistent"
            )


def _notes(store: Store, dataset_id: str) -> tuple[str, ...]:
    try:
        found = orphans(store, dataset_id)
    except WLLMError:
        return ()  # spec or receipts are damaged, which is among the faults
    return tuple(f"{folder(dataset_id)}/{name}: {size} bytes, no record" for name, size in found)

"""Check a committed dataset from end to end, and say what it is.

Loading stops at the first fault; this goes on and lists them all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, TypeAlias

from wllm_ray.dataset.format.documents import read_receipt
from wllm_ray.dataset.format.layout import MANIFEST_NAME, SPEC_NAME, folder, receipt_key, spec_key
from wllm_ray.dataset.format.manifest import Manifest, Receipt, ShardEntry, document_bytes
from wllm_ray.dataset.reading.decided import get_document
from wllm_ray.dataset.reading.files import DatasetFiles, open_manifest
from wllm_ray.dataset.reading.recheck import check_manifest, check_rows, check_traces, check_vectors
from wllm_ray.dataset.reading.repeated import RowIds
from wllm_ray.dataset.reading.rowtable import good_rows
from wllm_ray.dataset.reading.staged import orphans
from wllm_ray.dataset.stores.store import Root, Store, open_store
from wllm_ray.digest import sha256_hex
from wllm_ray.errors import IntegrityError, NotFoundError, WLLMError

__all__ = ["THREADS", "Fault", "OnBytes", "VerifyReport", "verify_dataset", "verify_files"]

# How many files are in memory at once where the root is no local folder; 64 MiB each by default.
THREADS = 4
# Told how many bytes are done, of how many.
OnBytes: TypeAlias = Callable[[int, int], None]

_RESTORE = (
    "the dataset is not what was committed; restore it from a copy, or capture it again under "
    "another dataset id"
)


def ignore_bytes(_done: int, _total: int) -> None:
    """Progress that nobody watches."""


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


@dataclass(frozen=True, slots=True)
class _Check:
    """One look at one file.

    Attributes:
        file: Which.
        bytes: How much of it is read.
        run: Raises what is wrong.
    """

    file: str
    bytes: int
    run: Callable[[], object]

    def fault(self) -> Fault | None:
        """What is wrong, or None."""
        try:
            self.run()
        except NotFoundError as error:
            return self._fault("file_missing", error)
        except WLLMError as error:
            return self._fault(error.code, error)
        return None

    def _fault(self, code: str, error: WLLMError) -> Fault:
        """Without the file's name where the message begins with it: a fault has it already."""
        return Fault(
            code, self.file, re.sub(rf"^(\S*/)?{re.escape(self.file)}: ", "", error.message)
        )


def verify_dataset(
    root: Root, dataset_id: str, *, threads: int = THREADS, on_bytes: OnBytes = ignore_bytes
) -> VerifyReport:
    """Check manifest, spec, receipts, every size, digest, header, table and value.

    Args:
        root: The storage root.
        dataset_id: Which dataset.
        threads: How many files are read at once.
        on_bytes: Told how many bytes are checked, of how many.

    Raises:
        NotFoundError: It is not committed here (``dataset_not_found``); the message says whether
            it was begun.
        InvalidInputError: An id or root that cannot be (``invalid_argument``).
    """
    store = open_store(root)
    try:
        manifest = open_manifest(store, dataset_id)
    except IntegrityError as error:
        fault = Fault(error.code, MANIFEST_NAME, error.message)
        advice = _advice(dataset_id, error)
        return VerifyReport(dataset_id, (fault,), (), files=1, bytes=0, advice=advice)
    return verify_files(DatasetFiles(store, manifest, "lazy"), threads=threads, on_bytes=on_bytes)


def _advice(dataset_id: str, error: IntegrityError) -> str:
    """A folder that was renamed holds nothing that is damaged."""
    own = error.details.get("manifest_dataset_id")
    if own is None:
        return _RESTORE
    return (
        f"the folder is called {dataset_id!r}, but its manifest is that of {own!r}: rename "
        f"{folder(dataset_id)} back to {folder(own)} and verify that"
    )


def _advice_on(faults: list[Fault]) -> str:
    if any(fault.code != "storage_failed" for fault in faults):
        return _RESTORE
    return "the storage root failed to read some files; verify again once it does" if faults else ""


def verify_files(
    files: DatasetFiles, *, threads: int = THREADS, on_bytes: OnBytes = ignore_bytes
) -> VerifyReport:
    """Check everything but the manifest, which is checked already, through these files.

    Hashing lets go of the interpreter, so files are checked in parallel; each is read once.
    """
    manifest = files.manifest
    checker = _Checker(files)
    checks = list(checker.checks())
    faults = []
    done, total = 0, sum(check.bytes for check in checks)
    with ThreadPoolExecutor(threads) as pool:
        for check, fault in zip(checks, pool.map(_Check.fault, checks), strict=True):
            faults += [fault] if fault else []
            done += check.bytes
            on_bytes(done, total)
    faults += checker.faults_between_files(is_sound=not faults)
    place = {check.file: number for number, check in enumerate(checks)}
    return VerifyReport(
        dataset_id=manifest.dataset_id,
        faults=tuple(sorted(faults, key=lambda fault: place.get(fault.file, -1))),
        notes=_notes(files.store, manifest),
        files=1 + len(checks),
        bytes=manifest.bytes,
        advice=_advice_on(faults),
    )


class _Checker:
    """Looks at one file after the other, and remembers what only all of them together tell."""

    def __init__(self, files: DatasetFiles) -> None:
        self._files, self._store, self._manifest = files, files.store, files.manifest
        self._spec = files.manifest.spec()
        self._ids = RowIds()
        self._receipts: dict[int, Receipt] = {}

    def checks(self) -> Iterator[_Check]:
        """What is to be done, in the order of the files."""
        yield _Check(SPEC_NAME, 0, self._spec_document)
        for shard in self._manifest.shards:
            key = receipt_key(self._manifest.dataset_id, shard.shard)
            yield _Check(key.rpartition("/")[2], 0, partial(self._receipt, key, shard))
            rows, trace = shard.rows_file, shard.trace_file
            yield _Check(rows.name, rows.bytes, partial(self._rows, shard))
            for number, entry in enumerate(shard.features_files):
                yield _Check(entry.name, entry.bytes, partial(self._features, shard, number))
            if trace is not None:
                yield _Check(trace.name, trace.bytes, partial(self._traces, shard))

    def faults_between_files(self, *, is_sound: bool) -> list[Fault]:
        """What is wrong although each file is right.

        Args:
            is_sound: No fault was found so far.
        """
        faults = list(self._repeated_ids())
        if is_sound:
            again = partial(check_manifest, self._manifest, self._receipts)
            checks = [_Check(MANIFEST_NAME, 0, again), *self._trace_checks()]
            faults += [fault for check in checks if (fault := check.fault())]
        return faults

    def _spec_document(self) -> None:
        if get_document(self._store, spec_key(self._manifest.dataset_id)) != document_bytes(
            self._spec
        ):
            raise IntegrityError(
                "spec.json is not the spec that the manifest was made from", code="digest_mismatch"
            )

    def _receipt(self, key: str, shard: ShardEntry) -> None:
        data = get_document(self._store, key)
        if sha256_hex(data) != shard.receipt_sha256:
            raise IntegrityError(
                "the receipt is not the one that the manifest was made from",
                code="digest_mismatch",
            )
        self._receipts[shard.shard] = read_receipt(data, self._spec, shard.shard)

    def _rows(self, shard: ShardEntry) -> None:
        batch = self._files.rows(shard.shard)
        check_rows(batch, shard, self._manifest.position)
        self._ids.add(shard.shard, batch.column("id").to_pylist())

    def _ids_of(self, shard: int) -> list[str]:
        ids: list[str] = self._files.rows(shard).column("id").to_pylist()
        return ids

    def _repeated_ids(self) -> Iterator[Fault]:
        """One fault for each rows table with an id that was there before."""
        shards = self._manifest.shards
        found = self._ids.repeated(self._ids_of)
        for table, group in groupby(found, key=lambda one: one[2].table):
            (row_id, *places), *more = group
            first, second = (shards[place.table].first_row + place.row for place in places)
            yield Fault(
                "rows_inconsistent",
                shards[table].rows_file.name,
                f"rows {first} and {second} have the same id {row_id!a}"
                + (f", and {len(more)} more such" if more else ""),
            )

    def _features(self, shard: ShardEntry, number: int) -> None:
        entry = shard.features_files[number]
        array = self._files.checked(shard.shard, number, self._files.raw(entry))
        check_vectors(entry.name, array, self._manifest.dtype)

    def _traces(self, shard: ShardEntry) -> None:
        try:
            good = good_rows(self._files.rows(shard.shard))
        except WLLMError:
            # A fault of the rows table, whose own check names it: not of this file as well.
            assert shard.trace_file is not None, "only shards with traces come here"
            self._files.checked_table(shard.trace_file)
        else:
            self._files.traces(shard.shard, good)

    def _trace_checks(self) -> Iterator[_Check]:
        for shard in self._manifest.shards if self._manifest.trace else ():
            for number, entry in enumerate(shard.features_files):
                yield _Check(entry.name, 0, partial(check_traces, self._files, shard.shard, number))


def _notes(store: Store, manifest: Manifest) -> tuple[str, ...]:
    dataset_id = manifest.dataset_id
    # Where a receipt is missing, which is a fault, its files have the manifest's word.
    named = {entry.name for shard in manifest.shards for entry in shard.files}
    try:
        found = [one for one in orphans(store, dataset_id) if one[0] not in named]
    except WLLMError:
        return ()  # spec or receipts are damaged, which is among the faults
    return tuple(f"{folder(dataset_id)}/{name}: {size} bytes, no record" for name, size in found)

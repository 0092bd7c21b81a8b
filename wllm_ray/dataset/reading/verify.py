"""Check a committed dataset from end to end, and say what it is.

Loading stops at the first fault; this goes on and lists them all.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

from wllm_ray.dataset.format.layout import DATASETS, MANIFEST_NAME, folder
from wllm_ray.dataset.reading.checks import Check, Checker, Fault
from wllm_ray.dataset.reading.files import DatasetFiles, open_manifest
from wllm_ray.dataset.stores.store import Root, Store, open_store
from wllm_ray.errors import IntegrityError

__all__ = ["THREADS", "Fault", "OnBytes", "VerifyReport", "verify_dataset", "verify_files"]

# How many files are read at once, so in memory where the root is no local folder: 64 MiB each by
# default. Local ones by no more threads than there are cores, which would only be in each other's
# way.
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


def verify_dataset(
    root: Root, dataset_id: str, *, threads: int | None = None, on_bytes: OnBytes = ignore_bytes
) -> VerifyReport:
    """Check manifest, spec, receipts, every size, digest, header, table and value.

    Args:
        root: The storage root.
        dataset_id: Which dataset.
        threads: How many files are read at once; by default :data:`THREADS`, of local ones as
            many as there are cores if that is less.
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
    files: DatasetFiles, *, threads: int | None = None, on_bytes: OnBytes = ignore_bytes
) -> VerifyReport:
    """Check everything but the manifest, which is checked already, through these files.

    Hashing lets go of the interpreter, so files are checked in parallel; each is read once.
    """
    manifest = files.manifest
    checker = Checker(files)
    checks = list(checker.checks())
    faults = []
    done, total = 0, sum(check.bytes for check in checks)
    # Closed at once where this is interrupted: what is not begun is then not done.
    with contextlib.closing(_run(checks, threads or _threads(files.store))) as results:
        for check, fault in results:
            faults += [fault] if fault else []
            done += check.bytes
            on_bytes(done, total)
    faults += checker.faults_between_files(is_sound=not faults)
    place = {check.file: number for number, check in enumerate(checks)}
    return VerifyReport(
        dataset_id=manifest.dataset_id,
        faults=tuple(sorted(faults, key=lambda fault: place.get(fault.file, -1))),
        notes=tuple(f"{key}: {size} bytes, no record" for key, size in checker.without_record),
        files=1 + len(checks),
        bytes=manifest.bytes,
        advice=_advice_on(faults),
    )


def _threads(store: Store) -> int:
    is_local = store.local_path(DATASETS) is not None
    return min(THREADS, os.cpu_count() or 1) if is_local else THREADS


def _run(checks: Sequence[Check], threads: int) -> Generator[tuple[Check, Fault | None]]:
    """Each check and what it found, in no order.

    Most of a table's check holds the interpreter, most of a features file's does not. So one
    thread begins with the tables and the others with the features files, and none waits.
    """
    left = deque(sorted(checks, key=lambda check: check.is_free))
    first: list[int] = []

    def run_next(_number: int) -> tuple[Check, Fault | None]:
        check = left.popleft() if threading.get_ident() == first[0] else left.pop()
        return check, check.fault()

    with ThreadPoolExecutor(
        threads, initializer=lambda: first.append(threading.get_ident())
    ) as pool:
        yield from pool.map(run_next, range(len(checks)))

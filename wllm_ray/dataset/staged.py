"""What is staged under a dataset id so far: the spec, the receipts, and the files they name.

Resuming is set arithmetic over :func:`staged_shards`: planned minus proven.
"""

from __future__ import annotations

import hashlib

from wllm_ray.dataset.documents import read_receipt, read_spec
from wllm_ray.dataset.layout import (
    MANIFEST_NAME,
    SPEC_NAME,
    folder,
    receipt_key,
    receipt_shard,
    spec_key,
)
from wllm_ray.dataset.manifest import DatasetSpec, FileEntry, Receipt
from wllm_ray.dataset.store import Store
from wllm_ray.errors import IntegrityError, NotFoundError

__all__ = [
    "check_file",
    "expect_size",
    "load_spec",
    "orphans",
    "read_receipts",
    "staged_shards",
]


def load_spec(store: Store, dataset_id: str) -> DatasetSpec:
    """Read the spec of a dataset that was begun.

    Raises:
        NotFoundError: No dataset with this id was begun here (``dataset_not_found``).
        IntegrityError: The spec is not valid, or is another dataset's.
    """
    try:
        spec = read_spec(store.get(spec_key(dataset_id)))
    except NotFoundError:
        raise NotFoundError(
            f"no dataset {dataset_id!r} was begun under {store.uri}", code="dataset_not_found"
        ) from None
    if spec.dataset_id != dataset_id:
        raise IntegrityError(
            f"the spec in the folder of {dataset_id!r} is that of {spec.dataset_id!r}",
            code="rows_inconsistent",
        )
    return spec


def staged_shards(store: Store, spec: DatasetSpec) -> dict[int, Receipt]:
    """What need not be done again: shard number → receipt, each file's size and digest checked.

    Raises:
        IntegrityError: A receipt or a file that it names is damaged, missing or of another spec.
            Nothing is guessed: remove the damaged receipt to have its shard captured again.
    """
    sizes = dict(store.list(folder(spec.dataset_id)))
    staged = read_receipts(store, spec, sizes)
    for receipt in staged.values():
        for entry in receipt.files:
            check_file(store, spec.dataset_id, entry)
    return staged


def orphans(store: Store, dataset_id: str) -> list[tuple[str, int]]:
    """(name, bytes) of files in the dataset's folder that no record names.

    They are what attempts left that died or lost a race; harmless, and removed only by hand.
    """
    spec = load_spec(store, dataset_id)
    sizes = dict(store.list(folder(dataset_id)))
    receipts = read_receipts(store, spec, sizes)
    known = {SPEC_NAME, MANIFEST_NAME}
    for number, receipt in receipts.items():
        known.add(receipt_key(dataset_id, number).rpartition("/")[2])
        known.update(entry.name for entry in receipt.files)
    names = {key.removeprefix(folder(dataset_id) + "/"): size for key, size in sizes.items()}
    return sorted((name, size) for name, size in names.items() if name not in known)


def read_receipts(store: Store, spec: DatasetSpec, sizes: dict[str, int]) -> dict[int, Receipt]:
    """Every receipt among the listed keys, checked against the spec; files are not read.

    Raises:
        IntegrityError: A receipt is damaged, or of another spec.
    """
    found = {}
    for key in sizes:
        number = receipt_shard(key.removeprefix(folder(spec.dataset_id) + "/"))
        if number is None:
            continue
        if number >= len(spec.shards):
            raise IntegrityError(
                f"{key} is the receipt of a shard that the spec does not have",
                code="rows_inconsistent",
            )
        found[number] = _named(key, store, spec, number)
    return dict(sorted(found.items()))


def _named(key: str, store: Store, spec: DatasetSpec, number: int) -> Receipt:
    try:
        return read_receipt(store.get(key), spec, number)
    except IntegrityError as error:
        raise IntegrityError(
            f"{key}: {error.message}", code=error.code, details=error.details
        ) from None


def check_file(store: Store, dataset_id: str, entry: FileEntry) -> None:
    """Compare size and SHA-256 of one file with its record.

    Raises:
        IntegrityError: ``file_missing``, ``size_mismatch`` or ``digest_mismatch``.
    """
    key = f"{folder(dataset_id)}/{entry.name}"
    expect_size(dataset_id, entry, store.size(key))
    path = store.local_path(key)
    if path is None:
        found = hashlib.sha256(store.get(key)).hexdigest()
    else:
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != entry.sha256:
        raise IntegrityError(
            f"{key}: expected SHA-256 {entry.sha256}, found {found}; the file was damaged after "
            f"it was written. Restore it, or remove the shard's receipt to capture it again",
            code="digest_mismatch",
            details={"file": entry.name},
        )


def expect_size(dataset_id: str, entry: FileEntry, found: int | None) -> None:
    """Compare a file's size, None where there is no file, with its record.

    Raises:
        IntegrityError: ``file_missing`` or ``size_mismatch``.
    """
    if found == entry.bytes:
        return
    key = f"{folder(dataset_id)}/{entry.name}"
    state = "it is missing" if found is None else f"found {found}"
    raise IntegrityError(
        f"{key}: expected {entry.bytes} bytes, {state}. Restore it, or remove the shard's receipt "
        f"to capture it again",
        code="file_missing" if found is None else "size_mismatch",
        details={"file": entry.name},
    )

"""What is staged under a dataset id so far: the spec, the receipts, and the files they name.

Resuming is set arithmetic over :func:`staged_shards`: planned minus proven. Once the manifest is
there nothing is planned any more: what is not as it says is damage, never work to be done.
"""

from __future__ import annotations

import hashlib

from wllm_ray.dataset.format.abandoned import abandoned_mark
from wllm_ray.dataset.format.documents import (
    read_manifest,
    read_receipt,
    read_spec,
)
from wllm_ray.dataset.format.layout import (
    MANIFEST_NAME,
    folder,
    manifest_key,
    receipt_key,
    receipt_shard,
    spec_key,
)
from wllm_ray.dataset.format.manifest import DatasetSpec, FileEntry, Manifest, Receipt
from wllm_ray.dataset.reading.decided import expect_not_abandoned, get_document, is_abandoned
from wllm_ray.dataset.reading.maps import reading
from wllm_ray.dataset.stores.store import Store
from wllm_ray.digest import sha256_hex
from wllm_ray.errors import IntegrityError, NotFoundError

__all__ = [
    "check_file",
    "committed_receipts",
    "expect_committed_spec",
    "expect_listed",
    "expect_not_lost",
    "expect_size",
    "load_spec",
    "read_receipts",
    "staged_shards",
    "standing_manifest",
]


def load_spec(store: Store, dataset_id: str) -> DatasetSpec:
    """Read the spec of a dataset that was begun.

    Raises:
        NotFoundError: No dataset with this id was begun here (``dataset_not_found``).
        IntegrityError: The spec is not valid, or is another dataset's; or the dataset is committed
            and has lost it (``file_missing``).
        ConflictError: It was given up (``dataset_abandoned``).
    """
    try:
        spec = read_spec(get_document(store, spec_key(dataset_id)))
    except NotFoundError:
        expect_not_lost(store, spec_key(dataset_id), dataset_id)
        raise NotFoundError(
            f"no dataset {dataset_id!r} was begun under {store.uri}", code="dataset_not_found"
        ) from None
    if spec.dataset_id != dataset_id:
        raise IntegrityError(
            f"the spec in the folder of {dataset_id!r} is that of {spec.dataset_id!r}; rename the "
            f"folder back to {spec.dataset_id!r}, or use another dataset id",
            code="rows_inconsistent",
        )
    return spec


def standing_manifest(store: Store, dataset_id: str) -> Manifest | None:
    """The manifest of a committed dataset, checked, or None where it is not committed.

    Raises:
        IntegrityError: The manifest is not valid, or is another dataset's.
    """
    try:
        data = get_document(store, manifest_key(dataset_id))
    except NotFoundError:
        return None
    if data == abandoned_mark(dataset_id):
        return None
    manifest = read_manifest(data)
    if manifest.dataset_id != dataset_id:
        raise IntegrityError(
            f"the folder {folder(dataset_id)} holds the manifest of dataset "
            f"{manifest.dataset_id!r}, and a dataset's folder keeps its id as its name; rename it "
            f"back to {folder(manifest.dataset_id)}",
            code="rows_inconsistent",
            details={"manifest_dataset_id": manifest.dataset_id},
        )
    return manifest


def staged_shards(store: Store, spec: DatasetSpec) -> dict[int, Receipt]:
    """What need not be done again: shard number → receipt, each file's size and digest checked.

    Of a committed dataset that is every shard.

    Raises:
        IntegrityError: A receipt or a file that it names is damaged, missing or of another spec.
            Nothing is guessed: the message says what can be done.
    """
    # Looked for before the listing, which then holds every receipt that the manifest stands on.
    manifest = standing_manifest(store, spec.dataset_id)
    if manifest is None:
        staged = read_receipts(store, spec, dict(store.list(folder(spec.dataset_id))))
    else:
        staged = committed_receipts(store, spec, manifest)
    for receipt in staged.values():
        for entry in receipt.files:
            check_file(store, spec.dataset_id, entry)
    return staged


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
        return read_receipt(get_document(store, key), spec, number)
    except IntegrityError as error:
        raise IntegrityError(
            f"{key}: {error.message}", code=error.code, details=error.details
        ) from None


def committed_receipts(store: Store, spec: DatasetSpec, manifest: Manifest) -> dict[int, Receipt]:
    """The receipts of a committed dataset, each the very one that its manifest was made from.

    Raises:
        IntegrityError: The spec or a receipt is another one (``digest_mismatch``), or a receipt
            is missing (``file_missing``).
    """
    expect_committed_spec(store, spec, manifest)
    found = {}
    for shard in manifest.shards:
        key = receipt_key(spec.dataset_id, shard.shard)
        try:
            data = get_document(store, key)
        except NotFoundError:
            raise _lost(store, key) from None
        _expect_recorded(store, key, sha256_hex(data), shard.receipt_sha256)
        found[shard.shard] = _named(key, store, spec, shard.shard)
    return found


def expect_committed_spec(store: Store, spec: DatasetSpec, manifest: Manifest) -> None:
    """Compare the stored spec of a committed dataset with its manifest.

    Raises:
        IntegrityError: ``digest_mismatch``.
    """
    _expect_recorded(store, spec_key(spec.dataset_id), spec.sha256, manifest.spec_sha256)


def expect_not_lost(store: Store, key: str, dataset_id: str) -> None:
    """Refuse to go on without a document that a committed dataset has lost.

    Raises:
        IntegrityError: The manifest is there and the document is not (``file_missing``).
        ConflictError: The dataset was given up (``dataset_abandoned``).
    """
    if store.size(manifest_key(dataset_id)) is not None and store.size(key) is None:
        expect_not_abandoned(store, dataset_id)
        raise _lost(store, key)


def _lost(store: Store, key: str) -> IntegrityError:
    return IntegrityError(
        f"{key}: it is missing. {_advice(store, key)}",
        code="file_missing",
        details={"file": key.rpartition("/")[2]},
    )


def _expect_recorded(store: Store, key: str, found: str, recorded: str) -> None:
    if found != recorded:
        raise IntegrityError(
            f"{key}: it is not the one that the manifest was made from (expected SHA-256 "
            f"{recorded}, found {found}). {_advice(store, key)}",
            code="digest_mismatch",
            details={"file": key.rpartition("/")[2]},
        )


def _advice(store: Store, key: str) -> str:
    """What to do about a file that is not what its record says; the key is in its folder."""
    if is_abandoned(store, key.split("/")[1]):
        return "The dataset was given up; nothing of it can be committed"
    if store.size(f"{key.rpartition('/')[0]}/{MANIFEST_NAME}") is None:
        return (
            "Restore it, or remove the shard's receipt while no job is running, to capture it again"
        )
    return (
        "The dataset is committed, so nothing of it is captured again: restore the file from a "
        "copy, or capture under another dataset id"
    )


def check_file(store: Store, dataset_id: str, entry: FileEntry) -> None:
    """Compare size and SHA-256 of one file with its record.

    Raises:
        IntegrityError: ``file_missing``, ``size_mismatch`` or ``digest_mismatch``.
        StorageError: It cannot be read.
    """
    key = f"{folder(dataset_id)}/{entry.name}"
    expect_size(store, dataset_id, entry, store.size(key))
    path = store.local_path(key)
    if path is None:
        found = hashlib.sha256(store.get(key)).hexdigest()
    else:
        with reading(path), path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != entry.sha256:
        raise IntegrityError(
            f"{key}: expected SHA-256 {entry.sha256}, found {found}; the file was damaged after "
            f"it was written. {_advice(store, key)}",
            code="digest_mismatch",
            details={"file": entry.name},
        )


def expect_listed(store: Store, dataset_id: str, entry: FileEntry, listed: int | None) -> None:
    """As :func:`expect_size`, by a listing, which may lag behind: what it lacks is asked for."""
    found = store.size(f"{folder(dataset_id)}/{entry.name}") if listed is None else listed
    expect_size(store, dataset_id, entry, found)


def expect_size(store: Store, dataset_id: str, entry: FileEntry, found: int | None) -> None:
    """Compare a file's size, None where there is no file, with its record.

    Raises:
        IntegrityError: ``file_missing`` or ``size_mismatch``.
    """
    if found == entry.bytes:
        return
    key = f"{folder(dataset_id)}/{entry.name}"
    state = "it is missing" if found is None else f"found {found}"
    raise IntegrityError(
        f"{key}: expected {entry.bytes} bytes, {state}. {_advice(store, key)}",
        code="file_missing" if found is None else "size_mismatch",
        details={"file": entry.name},
    )

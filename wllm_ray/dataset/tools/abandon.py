"""Give up a dataset that was begun and never committed: remove all that lies under its id.

Abandoning and committing race for one name. The mark of an abandoned dataset is created where
its manifest would be, create-only like that: whoever comes first has decided, and the other is
told. The mark stays when all else is gone, since a committer may be slow; that no writer is left is
for people to know, who free the id by giving it up once more.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta

from wllm_ray.dataset.format.abandoned import abandoned_mark
from wllm_ray.dataset.format.layout import (
    MANIFEST_NAME,
    SPEC_NAME,
    folder,
    manifest_key,
    receipt_shard,
)
from wllm_ray.dataset.reading.decided import is_abandoned
from wllm_ray.dataset.stores.probing import expect_create_only
from wllm_ray.dataset.stores.store import Root, Store, open_store
from wllm_ray.dataset.tools.folders import file_sizes, is_ours
from wllm_ray.errors import AlreadyExistsError, ConflictError

__all__ = ["ONE_DAY", "abandon_dataset"]

ONE_DAY = timedelta(days=1)
# A writer that does not know yet may put a file where one was removed; it stops when it is told.
_ROUNDS = 3


def abandon_dataset(
    root: Root,
    dataset_id: str,
    *,
    delete: bool = False,
    older_than: timedelta = ONE_DAY,
    now: datetime | None = None,
) -> list[tuple[str, int]]:
    """List what lies under an id that was never committed, and remove it on request.

    The id is kept from use by a mark. Where nothing else is left of it, the mark is what is listed
    and removed, and the id is free again. Run again after an interruption, it goes on. Files that
    are not of this library stay.

    Args:
        root: The storage root.
        dataset_id: The dataset to give up.
        delete: Remove the files; they cannot be had back.
        older_than: Remove nothing where a file was written since: a writer may be at work. Zero:
            none is.
        now: The time to count from; the present where omitted.

    Returns:
        (key, bytes) of each file that goes, or went.

    Raises:
        NotFoundError: No file lies under this id (``dataset_not_found``).
        ConflictError: It is committed (``dataset_immutable``), or a writer may be at work on it
            (``dataset_conflict``), or the root does not honour create-only writes, so that a
            commit could not be told from this (``single_writer_root``).
        StorageError: The root failed to list, read, write or delete.
    """
    store = open_store(root)
    was_marked = is_abandoned(store, dataset_id)
    if store.size(manifest_key(dataset_id)) is not None and not was_marked:
        raise _committed(dataset_id)
    if delete and older_than > timedelta(0):
        _expect_no_writer(store, dataset_id, (now or datetime.now(UTC)) - older_than)
    if delete and not was_marked:
        expect_create_only(store)
        _mark(store, dataset_id)
    # After the mark: what a commit would have needed is not written any more.
    found = _files(store, dataset_id)
    if was_marked and not found:
        return _free(store, dataset_id, delete=delete)
    if not delete:
        return [*found.items()]
    removed: dict[str, int] = {}
    for _ in range(_ROUNDS):
        for key in found:
            store.delete(key)
        removed |= found
        if not (found := _files(store, dataset_id)):
            break
    return [*removed.items()]


def _files(store: Store, dataset_id: str) -> dict[str, int]:
    """Key → bytes of what goes, in this order; the mark is not among it."""
    sizes = file_sizes(store, dataset_id)
    names = sorted((name for name in sizes if is_ours(name) and name != MANIFEST_NAME), key=_order)
    return {f"{folder(dataset_id)}/{name}": sizes[name] for name in names}


def _order(name: str) -> tuple[int, str]:
    """Receipts first, so that no receipt ever names a file that is gone; the spec last."""
    is_receipt = receipt_shard(name) is not None
    return (2 if name == SPEC_NAME else 0 if is_receipt else 1), name


def _free(store: Store, dataset_id: str, *, delete: bool) -> list[tuple[str, int]]:
    """Remove the mark, and with it all that is left of the dataset."""
    key = manifest_key(dataset_id)
    if delete:
        store.delete(key)
        path = store.local_path(folder(dataset_id))
        if path is not None:
            # Files of others may lie in it, or a writer may just have begun the same id again.
            with contextlib.suppress(OSError):
                path.rmdir()
    return [(key, len(abandoned_mark(dataset_id)))]


def _expect_no_writer(store: Store, dataset_id: str, written_before: datetime) -> None:
    for name in file_sizes(store, dataset_id):
        modified = store.modified(f"{folder(dataset_id)}/{name}")
        if modified is not None and modified >= written_before:
            raise ConflictError(
                f"dataset {dataset_id!r}: {name} was written at {modified:%Y-%m-%d %H:%M:%S} UTC, "
                f"so a writer may be at work; stop it, and give a smaller age (`--older-than 0`)",
            )


def _mark(store: Store, dataset_id: str) -> None:
    try:
        store.put(manifest_key(dataset_id), abandoned_mark(dataset_id))
    except AlreadyExistsError:
        raise _committed(dataset_id) from None


def _committed(dataset_id: str) -> ConflictError:
    return ConflictError(
        f"dataset {dataset_id!r} is committed, and only one that never was can be given up; "
        f"nothing was removed",
        code="dataset_immutable",
    )

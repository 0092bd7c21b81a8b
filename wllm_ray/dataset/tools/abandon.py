"""Give up a dataset that was begun and never committed: remove all that lies under its id.

Abandoning and committing race for one name. The mark of an abandoned dataset is created where
its manifest would be, create-only like that: whoever comes first has decided, and the other is
told. The mark goes last, so that a removal which was interrupted is known for what it is.
"""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta

from wllm_ray.dataset.format.layout import (
    MANIFEST_NAME,
    SPEC_NAME,
    folder,
    manifest_key,
    receipt_shard,
)
from wllm_ray.dataset.stores.probing import expect_create_only
from wllm_ray.dataset.stores.store import Root, Store, open_store
from wllm_ray.dataset.tools.folders import file_sizes, is_ours
from wllm_ray.digest import canonical_json
from wllm_ray.errors import AlreadyExistsError, ConflictError, IntegrityError

__all__ = ["ONE_DAY", "abandon_dataset", "expect_not_abandoned"]

ONE_DAY = timedelta(days=1)


def abandon_dataset(
    root: Root,
    dataset_id: str,
    *,
    delete: bool = False,
    older_than: timedelta = ONE_DAY,
    now: datetime | None = None,
) -> list[tuple[str, int]]:
    """List what lies under an id that was never committed, and remove it on request.

    Run again after an interruption, it goes on. Files that are not of this library stay.

    Args:
        root: The storage root.
        dataset_id: The dataset to give up.
        delete: Remove the files; they cannot be had back.
        older_than: Refuse where a file was written since: a writer may be at work.
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
    if store.size(manifest_key(dataset_id)) is not None and not _is_marked(store, dataset_id):
        raise _committed(dataset_id)
    _expect_no_writer(store, dataset_id, (now or datetime.now(UTC)) - older_than)
    if delete:
        expect_create_only(store)
        _mark(store, dataset_id)
    # After the mark: what a commit would have needed is not written any more.
    sizes = file_sizes(store, dataset_id)
    ours = sorted(filter(is_ours, sizes), key=_order)
    if delete:
        for name in ours:
            store.delete(f"{folder(dataset_id)}/{name}")
        _remove_empty_folder(store, dataset_id)
    return [(f"{folder(dataset_id)}/{name}", sizes[name]) for name in ours if name != MANIFEST_NAME]


def _remove_empty_folder(store: Store, dataset_id: str) -> None:
    """Leave no folder without files; object stores have none."""
    path = store.local_path(folder(dataset_id))
    if path is not None:
        # Files of others may lie in it, or a writer may just have begun the same id again.
        with contextlib.suppress(OSError):
            path.rmdir()


def _order(name: str) -> tuple[int, str]:
    """Receipts first, so that no receipt ever names a file that is gone; the mark last."""
    last = {SPEC_NAME: 2, MANIFEST_NAME: 3}
    return last.get(name, 0 if receipt_shard(name) is not None else 1), name


def expect_not_abandoned(store: Store, dataset_id: str) -> None:
    """Refuse a dataset whose removal has begun.

    Raises:
        IntegrityError: It is marked (``manifest_invalid``).
    """
    if _is_marked(store, dataset_id):
        raise IntegrityError(
            f"dataset {dataset_id!r} was being given up when that was interrupted; finish it with "
            f"`wllm gc --abandon --delete`",
        )


def _is_marked(store: Store, dataset_id: str) -> bool:
    """Whether the mark stands where a manifest would."""
    key = manifest_key(dataset_id)
    return store.size(key) is not None and store.get(key) == _mark_bytes(dataset_id)


def _expect_no_writer(store: Store, dataset_id: str, written_before: datetime) -> None:
    for name in file_sizes(store, dataset_id):
        modified = store.modified(f"{folder(dataset_id)}/{name}")
        if name != MANIFEST_NAME and modified is not None and modified >= written_before:
            raise ConflictError(
                f"dataset {dataset_id!r}: {name} was written at {modified:%Y-%m-%d %H:%M:%S} UTC, "
                f"so a writer may be at work; stop it, and give a smaller age (`--older-than 0`)",
            )


def _mark(store: Store, dataset_id: str) -> None:
    try:
        store.put(manifest_key(dataset_id), _mark_bytes(dataset_id))
    except AlreadyExistsError:
        raise _committed(dataset_id) from None


def _mark_bytes(dataset_id: str) -> bytes:
    return canonical_json(
        {"dataset_id": dataset_id, "format": "wllm_ray.abandoned", "format_version": 1}
    )


def _committed(dataset_id: str) -> ConflictError:
    return ConflictError(
        f"dataset {dataset_id!r} is committed, and only one that never was can be given up; "
        f"nothing was removed",
        code="dataset_immutable",
    )

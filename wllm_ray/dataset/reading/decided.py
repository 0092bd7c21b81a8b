"""Documents as they stand under a root, and the mark of a dataset that was given up."""

from __future__ import annotations

from wllm_ray.dataset.format.abandoned import abandoned_mark
from wllm_ray.dataset.format.documents import MAX_DOCUMENT_BYTES
from wllm_ray.dataset.format.layout import manifest_key
from wllm_ray.dataset.stores.store import Store
from wllm_ray.errors import ConflictError

__all__ = ["expect_not_abandoned", "get_document", "is_abandoned"]


def get_document(store: Store, key: str) -> bytes:
    """Read a spec, receipt or manifest.

    Raises:
        NotFoundError: There is none (``object_not_found``).
        IntegrityError: It is larger than any document (``manifest_invalid``); it was not read.
        StorageError: The root failed to read.
    """
    return store.get(key, most_bytes=MAX_DOCUMENT_BYTES)


def is_abandoned(store: Store, dataset_id: str) -> bool:
    """Whether the mark of a dataset that was given up stands where its manifest would."""
    key, mark = manifest_key(dataset_id), abandoned_mark(dataset_id)
    return store.size(key) == len(mark) and get_document(store, key) == mark


def expect_not_abandoned(store: Store, dataset_id: str) -> None:
    """Refuse to work on a dataset that was given up.

    Raises:
        ConflictError: It was (``dataset_abandoned``).
    """
    if is_abandoned(store, dataset_id):
        raise ConflictError(
            f"dataset {dataset_id!r} was given up under {store.uri} before it was committed, and "
            f"its id is kept from use, since a writer of it may still be about to commit. Use "
            f"another id; or, where no writer of it is left, free this one with `wllm gc ROOT "
            f"{dataset_id} --abandon --delete --older-than 0`",
            code="dataset_abandoned",
        )

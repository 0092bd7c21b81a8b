"""The files in a dataset's folder, and what their names say of where they come from."""

from __future__ import annotations

import re

from wllm_ray.dataset.format.layout import (
    DATASETS,
    MANIFEST_NAME,
    SPEC_NAME,
    check_dataset_id,
    folder,
    receipt_shard,
)
from wllm_ray.dataset.stores.keys import TEMPORARY_PREFIX
from wllm_ray.dataset.stores.store import Store
from wllm_ray.errors import InvalidInputError, NotFoundError

__all__ = ["content_shard", "dataset_ids", "file_sizes", "is_ours", "is_temporary"]

_CONTENT = re.compile(r"shard-([0-9]{5,9})-[0-9a-f]{16}\..+")


def dataset_ids(store: Store) -> list[str]:
    """Ids of all folders of datasets, committed or not, sorted; what else is there is not ours."""
    names = {key.split("/")[1] for key, _ in store.list(DATASETS) if key.count("/") > 1}
    return sorted(filter(_is_dataset_id, names))


def file_sizes(store: Store, dataset_id: str) -> dict[str, int]:
    """Name → bytes of all files in the folder of a dataset, and in folders below.

    Raises:
        NotFoundError: There is none (``dataset_not_found``).
    """
    prefix = folder(dataset_id)
    sizes = {key.removeprefix(f"{prefix}/"): size for key, size in store.list(prefix)}
    if not sizes:
        raise NotFoundError(
            f"no file of a dataset {dataset_id!r} lies under {store.uri}; check root and id",
            code="dataset_not_found",
        )
    return sizes


def _is_dataset_id(name: str) -> bool:
    try:
        check_dataset_id(name)
    except InvalidInputError:
        return False
    return True


def is_temporary(name: str) -> bool:
    """Whether a file is one that a local root writes before it gives it its name."""
    return name.startswith(TEMPORARY_PREFIX) and "/" not in name


def content_shard(name: str) -> int | None:
    """The shard that a file under a content name is of, or None where it is no such file."""
    match = _CONTENT.fullmatch(name)
    return int(match[1]) if match and "/" not in name else None


def is_ours(name: str) -> bool:
    """Whether a file has a name that only a writer of datasets gives."""
    return (
        name in (SPEC_NAME, MANIFEST_NAME)
        or receipt_shard(name) is not None
        or content_shard(name) is not None
        or is_temporary(name)
    )

"""Where the files of a dataset lie under a storage root, and what they are called."""

from __future__ import annotations

import re

from wllm_ray.errors import InvalidInputError
from wllm_ray.schema import DATASET_ID_PATTERN

__all__ = [
    "DATASETS",
    "MANIFEST_NAME",
    "ROWS_SUFFIX",
    "SPEC_NAME",
    "TRACE_SUFFIX",
    "check_dataset_id",
    "content_prefix",
    "features_suffix",
    "file_name",
    "folder",
    "manifest_key",
    "receipt_key",
    "receipt_shard",
    "spec_key",
    "split_dataset_path",
]

DATASETS = "datasets"
SPEC_NAME = "spec.json"
MANIFEST_NAME = "manifest.json"
ROWS_SUFFIX = ".rows.arrow"
TRACE_SUFFIX = ".trace.arrow"

_DATASET_ID = re.compile(DATASET_ID_PATTERN.rstrip("$"))
_RECEIPT = re.compile(r"shard-([0-9]{5,9})\.receipt\.json")


def check_dataset_id(dataset_id: str) -> None:
    """Refuse an id that is not one plain path component.

    Raises:
        InvalidInputError: Code ``invalid_argument``.
    """
    if not _DATASET_ID.fullmatch(dataset_id):
        raise InvalidInputError(
            f"a dataset id starts with a letter or digit and holds at most 128 letters, digits, "
            f"dots, dashes and underscores; found {dataset_id!a}",
            code="invalid_argument",
        )


def folder(dataset_id: str) -> str:
    """Key of the dataset's own folder, without a slash at the end."""
    check_dataset_id(dataset_id)
    return f"{DATASETS}/{dataset_id}"


def split_dataset_path(path: str) -> tuple[str, str] | None:
    """Storage root and dataset id of ``ROOT/datasets/DATASET_ID``; None for any other path."""
    parent, _, dataset_id = path.rstrip("/").rpartition("/")
    base, slash, datasets = parent.rpartition("/")
    if datasets != DATASETS or not dataset_id:
        return None
    return base or slash or ".", dataset_id


def spec_key(dataset_id: str) -> str:
    """Key of the document that says what was asked."""
    return f"{folder(dataset_id)}/{SPEC_NAME}"


def manifest_key(dataset_id: str) -> str:
    """Key of the document whose presence makes the dataset exist."""
    return f"{folder(dataset_id)}/{MANIFEST_NAME}"


def receipt_key(dataset_id: str, shard: int) -> str:
    """Key of the document whose presence makes the shard whole."""
    return f"{folder(dataset_id)}/shard-{shard:05d}.receipt.json"


def receipt_shard(name: str) -> int | None:
    """The shard number of a receipt's file name, or None where the name is not a receipt's."""
    match = _RECEIPT.fullmatch(name)
    return int(match[1]) if match and name == f"shard-{int(match[1]):05d}.receipt.json" else None


def content_prefix(dataset_id: str, shard: int) -> str:
    """What a shard file's key begins with; the digest and a suffix follow."""
    return f"{folder(dataset_id)}/shard-{shard:05d}-"


def features_suffix(site: str | None, shard_format: str) -> str:
    """What the name of a features file ends with: that of one site, or with None of all."""
    return f".{shard_format}" if site is None else f".{site}.{shard_format}"


def file_name(shard: int, sha256: str, suffix: str) -> str:
    """The only name that a shard file with this digest may have."""
    return f"shard-{shard:05d}-{sha256[:16]}{suffix}"

"""What a key may look like, and what a local root calls files that are being written."""

from __future__ import annotations

from wllm_ray.errors import IntegrityError

__all__ = ["TEMPORARY_PREFIX", "check_key", "expect_most", "is_listed"]

TEMPORARY_PREFIX = ".tmp-"


def check_key(key: str) -> None:
    """Refuse a key that is not a plain relative path below the root.

    Raises:
        IntegrityError: Code ``name_invalid``.
    """
    if not _is_plain(key):
        raise IntegrityError(
            f"expected a relative name without empty parts, '..' or backslashes, found {key!a}",
            code="name_invalid",
        )


def is_listed(key: str) -> bool:
    """Whether a listing has this key: others are of somebody else, and not to be opened."""
    return _is_plain(key) and key.isprintable()


def expect_most(key: str, size: int, most_bytes: int | None) -> None:
    """Refuse an object that is larger than anything that may lie under this key.

    Raises:
        IntegrityError: Code ``manifest_invalid``.
    """
    if most_bytes is not None and size > most_bytes:
        raise IntegrityError(
            f"{key}: expected a document of at most {most_bytes} bytes, found {size}; it is none "
            f"of this library, restore it from a copy",
            code="manifest_invalid",
        )


def _is_plain(key: str) -> bool:
    parts = key.split("/")
    return (
        not any(part in ("", ".", "..") for part in parts) and "\\" not in key and "\0" not in key
    )

"""What a key may look like, and what a local root calls files that are being written."""

from __future__ import annotations

from wllm_ray.errors import IntegrityError

__all__ = ["TEMPORARY_PREFIX", "check_key"]

TEMPORARY_PREFIX = ".tmp-"


def check_key(key: str) -> None:
    """Refuse a key that is not a plain relative path below the root.

    Raises:
        IntegrityError: Code ``name_invalid``.
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in key or "\0" in key:
        raise IntegrityError(
            f"expected a relative name without empty parts, '..' or backslashes, found {key!a}",
            code="name_invalid",
        )

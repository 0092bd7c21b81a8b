"""What the object-store client cannot stand in the environment, found before it breaks down."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from wllm_ray.errors import InvalidInputError

__all__ = ["check_environment"]

_ADDRESSES = {
    "s3": ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
}
# They go into headers or signatures, where a line break is an error or a wrong signature.
_PLAIN = {
    "s3": (
        "AWS_ACCESS_KEY_ID",
        "AWS_DEFAULT_REGION",
        "AWS_REGION",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "AWS_TOKEN",
    ),
    "gs": ("GOOGLE_BEARER_TOKEN",),
    "az": (
        "AZURE_STORAGE_ACCESS_KEY",
        "AZURE_STORAGE_ACCOUNT_KEY",
        "AZURE_STORAGE_ACCOUNT_NAME",
        "AZURE_STORAGE_MASTER_KEY",
        "AZURE_STORAGE_SAS_KEY",
        "AZURE_STORAGE_SAS_TOKEN",
        "AZURE_STORAGE_TOKEN",
    ),
}


def check_environment(scheme: str) -> None:
    """Refuse an address that is none, and a credential or region with more than its characters.

    Args:
        scheme: Of the storage root: ``s3``, ``gs`` or ``az``.

    Raises:
        InvalidInputError: Names the variable, and never repeats its value
            (code ``invalid_argument``).
    """
    for name in _set_among(_ADDRESSES[scheme]):
        if not _is_address(os.environ[name]):
            raise InvalidInputError(
                f"expected http:// or https://, a host and perhaps a port in the environment "
                f"variable {name}, found something else; write it as in http://localhost:9000, "
                f"or unset it",
                code="invalid_argument",
            )
    for name in _set_among(_PLAIN[scheme]):
        value = os.environ[name]
        if value != value.strip() or not value.isprintable():
            raise InvalidInputError(
                f"the environment variable {name} begins or ends with a blank or holds a line "
                f"break or another control character; set it without, for example with "
                f'{name}="$(cat FILE)", which drops line breaks at the end',
                code="invalid_argument",
            )


def _set_among(names: Sequence[str]) -> list[str]:
    return [name for name in names if name in os.environ]


def _is_address(value: str) -> bool:
    # Of the value itself, since parsing drops line breaks.
    if not re.fullmatch("[!-~]+", value):
        return False
    with contextlib.suppress(ValueError):  # a bracket without its pair, a port above 65535
        parts = urlsplit(value)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    return False

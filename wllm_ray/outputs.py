"""Where results are written that only a local disk can take."""

from __future__ import annotations

import os
import re
from pathlib import Path

from wllm_ray.errors import InvalidInputError

__all__ = ["local_output"]

# With one slash, too: that is what is left of an address once it was a `Path`.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")


def local_output(path: str | os.PathLike[str], kind: str) -> Path:
    """A path that is no address; taken for a path, ``s3://…`` would become a folder ``s3:``.

    Args:
        path: What was asked for.
        kind: What is written there, ``file`` or ``folder``, for the message.

    Raises:
        InvalidInputError: It is an address, which may hold a secret and is not repeated
            (``invalid_argument``).
    """
    if found := _SCHEME.match(os.fspath(path)):
        raise InvalidInputError(
            f"a local {kind} is needed to write to, found an address that begins with "
            f"{found[1]}:/; write into a local {kind} and copy that",
            code="invalid_argument",
        )
    return Path(path)

"""Local files as memory: nothing is read before it is looked at, and nothing is copied."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

__all__ = ["map_file", "map_privately"]


def map_file(path: os.PathLike[str]) -> NDArray[np.uint8] | None:
    """A whole file, [bytes] uint8, read-only; None where there is none, or no regular one.

    The path has no link left in it, and one put there meanwhile is refused.
    """
    with _opened(path) as descriptor:
        if descriptor is None:
            return None
        if not os.fstat(descriptor).st_size:
            return np.empty(0, np.uint8)
        # Python's own maps keep a descriptor each, and a dataset may have more files than a
        # process may have descriptors. Arrow opens by name, so it is given the one of ours.
        with pa.memory_map(f"/proc/self/fd/{descriptor}") as file:
            return np.frombuffer(file.read_buffer(), np.uint8)


def map_privately(path: os.PathLike[str]) -> NDArray[np.uint8] | None:
    """As :func:`map_file` for a file that is not empty, but what is written stays in here."""
    with _opened(path) as descriptor:
        if descriptor is None:
            return None
        with os.fdopen(os.dup(descriptor), "rb") as file:
            mapped: Any = np.memmap(file, np.uint8, mode="c")
    return np.asarray(mapped)


@contextlib.contextmanager
def _opened(path: os.PathLike[str]) -> Iterator[int | None]:
    """The descriptor of a regular file, or None where there is none."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            raise
        yield None
        return
    try:
        yield descriptor if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    finally:
        os.close(descriptor)

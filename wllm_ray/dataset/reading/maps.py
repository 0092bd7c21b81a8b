"""Local files as memory: large ones are read when they are looked at, and are not copied."""

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

from wllm_ray.errors import StorageError

__all__ = ["MAPPED_FROM", "MOST_MAPS", "map_file", "map_privately", "read_file", "reading"]

# Smaller files, in bytes, are read into memory: of these a dataset may have more than a process
# may have maps (65,530 unless the system is told otherwise), and reading one costs no more than
# mapping it does.
MAPPED_FROM = 64 << 10
# Maps that a dataset keeps: a quarter of those that a process may have.
MOST_MAPS = 1 << 14

# What is told of a name under which no regular file lies: nothing, a link, a socket.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO)
_ADVICE = {
    errno.EMFILE: "close some, or allow this process more (`ulimit -n`)",
    errno.ENOMEM: (
        "free memory, or let go of arrays that were read of other files: a process may have only "
        "so many maps of files (`sysctl vm.max_map_count`)"
    ),
}


def map_file(path: os.PathLike[str]) -> NDArray[np.uint8] | None:
    """A whole file, [bytes] uint8, read-only; None where there is none, or no regular one.

    The path has no link left in it, and one put there meanwhile is refused.

    Raises:
        StorageError: It cannot be read.
    """
    with reading(path), _opened(path) as descriptor:
        if descriptor is None:
            return None
        if os.fstat(descriptor).st_size < MAPPED_FROM:
            return _read(descriptor)
        # Python's own maps keep a descriptor each, and a dataset may have more files than a
        # process may have descriptors. Arrow opens by name, so it is given the one of ours.
        with pa.memory_map(f"/proc/self/fd/{descriptor}") as mapped:
            return np.frombuffer(mapped.read_buffer(), np.uint8)


def read_file(path: os.PathLike[str]) -> NDArray[np.uint8] | None:
    """As :func:`map_file`, but read: what becomes of the file later is not seen in it."""
    with reading(path), _opened(path) as descriptor:
        return None if descriptor is None else _read(descriptor)


def _read(descriptor: int) -> NDArray[np.uint8]:
    with open(descriptor, "rb", closefd=False) as file:
        return np.frombuffer(file.read(), np.uint8)


def map_privately(path: os.PathLike[str]) -> NDArray[np.uint8] | None:
    """As :func:`map_file` for a file that is not empty, but what is written stays in here."""
    with reading(path), _opened(path) as descriptor:
        if descriptor is None:
            return None
        with os.fdopen(os.dup(descriptor), "rb") as file:
            mapped: Any = np.memmap(file, np.uint8, mode="c")
    return np.asarray(mapped)


@contextlib.contextmanager
def reading(path: os.PathLike[str]) -> Iterator[None]:
    """Say of a local file that the system does not let us read which it is, and what to check.

    Raises:
        StorageError: Instead of any other ``OSError``.
    """
    try:
        yield
    except OSError as error:
        # Arrow passes on what the system says, and not its number.
        reason = error.strerror or str(error)
        known = (advice for number, advice in _ADVICE.items() if os.strerror(number) in reason)
        advice = next(known, "check its permissions and its disk")
        raise StorageError(
            f"could not read {os.fspath(path)}: {reason}; {advice}, and read again"
        ) from error


@contextlib.contextmanager
def _opened(path: os.PathLike[str]) -> Iterator[int | None]:
    """The descriptor of a regular file, or None where there is none."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        yield None
        return
    try:
        yield descriptor if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    finally:
        os.close(descriptor)

"""How a local root writes a file: temporary sibling, fsync, link; every step durable on return."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import re
import socket
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from wllm_ray.dataset.stores.buffers import sha256_of
from wllm_ray.dataset.stores.keys import TEMPORARY_PREFIX
from wllm_ray.errors import StorageError

__all__ = [
    "link",
    "make_folders",
    "sync_above",
    "sync_folder",
    "temporary_beside",
    "write",
    "write_and_hash",
]

_PRIVATE_FOLDER = 0o700
_PRIVATE_FILE = 0o600
# Below this a thread costs more than hashing.
_HASHED_ALONGSIDE = 1 << 20
_HASHERS = 16
# Several files that are written at once would otherwise all be flushed at the end, at once.
_WRITTEN_AT_ONCE = 8 << 20
_WORTH_WRITEBACK = 1 << 20


@contextlib.contextmanager
def temporary_beside(folder: Path) -> Iterator[Path]:
    """A name in the same folder that no other writer has, removed whatever happens."""
    host = re.sub(r"[^A-Za-z0-9.]", "_", socket.gethostname())
    # Host and process tell a person whose it is. They come again in the next container, where
    # what a killed writer left would be in the way.
    path = folder / f"{TEMPORARY_PREFIX}{host}-{os.getpid()}-{uuid.uuid4().hex[:16]}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def write_and_hash(path: Path, buffers: list[memoryview]) -> str:
    """Both at once: they release the interpreter lock, so it takes as long as the slower one."""
    if sum(map(len, buffers)) < _HASHED_ALONGSIDE:
        write(path, buffers)
        return sha256_of(buffers)
    hashing = _hashers(os.getpid()).submit(sha256_of, buffers)
    try:
        write(path, buffers)
    finally:
        sha256 = hashing.result()  # waited for in any case: the buffers are the caller's
    return sha256


@functools.cache
def _hashers(_process: int) -> ThreadPoolExecutor:
    """Threads that hash, kept, since starting one costs milliseconds; a fork gets its own.

    Each caller waits for its one. With fewer threads than callers, a file that is written would
    wait for the hash of another, and then be hashed alone while the other cores have nothing to do.
    """
    return ThreadPoolExecutor(_HASHERS, thread_name_prefix="wllm-hash")


def write(path: Path, buffers: list[memoryview]) -> None:
    """Write a new file, private and durable."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _PRIVATE_FILE)
    try:
        end = 0
        for buffer in buffers:
            done = 0
            while done < len(buffer):
                count = os.write(descriptor, buffer[done : done + _WRITTEN_AT_ONCE])
                _begin_writeback(descriptor, end, count)
                done, end = done + count, end + count
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _begin_writeback(descriptor: int, start: int, count: int) -> None:
    """Let the disk have what was written while the rest is on its way; fsync waits for it.

    Linux begins to write back what is not to be kept, and drops only what is written back by then:
    hardly any of these bytes, so they are still in memory for whoever reads them next.
    """
    if count >= _WORTH_WRITEBACK:
        with contextlib.suppress(OSError):  # advice that nobody takes; fsync tells what is wrong
            os.posix_fadvise(descriptor, start, count, os.POSIX_FADV_DONTNEED)


def link(temporary: Path, path: Path) -> bool:
    """Give the file its final name; False if the name was taken.

    Raises:
        StorageError: The file system has no hard links.
        OSError: It refused for another reason, and the name is not this file's.
    """
    try:
        os.link(temporary, path)
    except OSError as error:
        # A network file system may lose the answer to a link that worked.
        if _is_same_file(temporary, path):
            return True
        if isinstance(error, FileExistsError):
            return False
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise StorageError(
                f"the file system of {path.parent} has no hard links, so create-only writes are "
                f"not possible there; choose another storage root"
            ) from error
        raise
    return True


def _is_same_file(one: Path, other: Path) -> bool:
    """False also where nobody can tell; what the caller met then counts."""
    with contextlib.suppress(OSError):
        return os.path.samestat(one.lstat(), other.lstat())
    return False


def sync_folder(folder: Path) -> None:
    """Make what a folder names durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folders(folder: Path) -> bool:
    """Make a folder and what it lies in, each private; False where it is there already."""
    if folder.is_dir():
        return False
    make_folders(folder.parent)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=_PRIVATE_FOLDER)
    return True


def sync_above(folder: Path, root: Path, durable: set[Path]) -> None:
    """Make the names of a folder, and of what it lies in up to the storage root, durable.

    Args:
        folder: The root, or a folder below it; whoever made it may have died before this.
        root: The storage root.
        durable: Folders whose names are; those that become it are added.
    """
    if folder in durable:
        return
    if folder != root:
        sync_above(folder.parent, root, durable)
    # The root may lie where nobody may look; then it was there before us.
    if folder != root or os.access(folder.parent, os.R_OK):
        sync_folder(folder.parent)
    durable.add(folder)

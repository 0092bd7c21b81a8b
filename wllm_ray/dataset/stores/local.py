"""A storage root in a local folder, durable on return.

Written as: temporary sibling → write → fsync → link (create) or rename (overwrite) → fsync of the
folder. ``link`` fails where the name exists, also on NFS, which makes create-only without locks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

from wllm_ray.dataset.stores.buffers import Buffers, views
from wllm_ray.dataset.stores.keys import check_key, expect_most, is_listed
from wllm_ray.dataset.stores.local_writing import (
    link,
    make_folders,
    sync_above,
    sync_folder,
    temporary_beside,
    write,
    write_and_hash,
)
from wllm_ray.dataset.stores.probing import probe_store
from wllm_ray.dataset.stores.ranges import check_ranges, expect_whole
from wllm_ray.dataset.stores.store import Probe, PutMode, Stored
from wllm_ray.errors import AlreadyExistsError, IntegrityError, NotFoundError, StorageError

__all__ = ["LocalStore"]


# How many folders below the one asked for are listed.
_DEEPEST = 8


class LocalStore:
    """The store contract over one folder. Symbolic links that leave the root are refused."""

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._durable: set[Path] = set()

    @property
    def uri(self) -> str:
        """The folder's absolute path."""
        return str(self._root)

    def put(self, key: str, data: Buffers, *, mode: PutMode = "create") -> bool:
        """Write one object; see :meth:`.store.Store.put`."""
        path = self._writable_path(key)
        # Not where content is written: nothing depends on it before a document names it.
        with _storage_errors("create the folder of", key, self.uri):
            sync_above(path.parent, Path(os.path.realpath(self._root)), self._durable)
        buffers = views(data)
        # Looking first leaves the folder as it was where a finished job is run again; the link
        # decides between writers.
        if not (mode == "create" and path.exists()) and self._write(path, buffers, mode):
            return True
        if not path.is_file():
            raise StorageError(
                f"could not write {key} under the storage root {self.uri}: something that is no "
                "file stands there; move it away and run again"
            )
        with _storage_errors("read", key, self.uri):
            is_same = path.read_bytes() == b"".join(buffers)
            # Who wrote it may have died before its name was durable.
            sync_folder(path.parent)
        if not is_same:
            raise AlreadyExistsError(
                f"{key} exists already under {self.uri} with other bytes; it was left as it is"
            )
        return False

    def _write(self, path: Path, buffers: list[memoryview], mode: PutMode) -> bool:
        with (
            _storage_errors("write", path.name, self.uri),
            temporary_beside(path.parent) as temporary,
        ):
            write(temporary, buffers)
            created = True
            if mode == "create":
                created = link(temporary, path)
            else:
                temporary.replace(path)
            sync_folder(path.parent)
        return created

    def put_content(self, prefix: str, suffix: str, data: Buffers) -> Stored:
        """Write one object under its content name; see :meth:`.store.Store.put_content`."""
        parent = self._writable_path(prefix + suffix).parent
        buffers = views(data)
        with _storage_errors("write", prefix, self.uri), temporary_beside(parent) as temporary:
            sha256 = write_and_hash(temporary, buffers)
            key = f"{prefix}{sha256[:16]}{suffix}"
            # A file of this name may be damaged; these bytes are known to be right.
            temporary.replace(self._writable_path(key))
            sync_folder(parent)
        return Stored(key, sum(map(len, buffers)), sha256)

    def get(self, key: str, *, most_bytes: int | None = None) -> bytes:
        """Read one object; see :meth:`.store.Store.get`."""
        with self.open(key) as stream, _storage_errors("read", key, self.uri):
            expect_most(key, os.fstat(stream.fileno()).st_size, most_bytes)
            return stream.read()

    def open(self, key: str) -> BinaryIO:
        """One object as a stream; see :meth:`.store.Store.open`."""
        path = self._path(key)
        with _storage_errors("read", key, self.uri):
            if path.is_symlink():  # what is left of one once all are resolved
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
            if path.is_file():
                with contextlib.suppress(FileNotFoundError):  # it has just gone
                    return path.open("rb")
        raise NotFoundError(f"no {key} under {self.uri}", code="object_not_found")

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes of one object; see :meth:`.store.Store.get_range`."""
        return bytes(self.get_ranges(key, [(start, stop)])[0])

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Several ranges of one object; see :meth:`.store.Store.get_ranges`."""
        check_ranges(key, ranges)
        with self.open(key) as stream, _storage_errors("read", key, self.uri):
            found = [_read_range(stream.fileno(), start, stop) for start, stop in ranges]
        for (start, stop), part in zip(ranges, found, strict=True):
            expect_whole(key, self.uri, stop - start, len(part))
        return found

    def size(self, key: str) -> int | None:
        """Bytes of one object, or None; see :meth:`.store.Store.size`."""
        found = self._stat(key)
        return None if found is None else found.st_size

    def modified(self, key: str) -> datetime | None:
        """When one object was written, or None; see :meth:`.store.Store.modified`."""
        found = self._stat(key)
        return None if found is None else datetime.fromtimestamp(found.st_mtime, UTC)

    def list(self, prefix: str) -> list[tuple[str, int]]:
        """(key, bytes) of every file below a folder; see :meth:`.store.Store.list`."""
        with _storage_errors("list", prefix, self.uri):
            return sorted(self._walk(prefix))

    def delete(self, key: str) -> None:
        """Remove one object; see :meth:`.store.Store.delete`."""
        path = self._path(key)
        with _storage_errors("delete", key, self.uri):
            path.unlink(missing_ok=True)

    def local_path(self, key: str) -> Path | None:
        """The object's file, all links resolved."""
        return self._path(key)

    def probe(self) -> Probe:
        """Find out by trying; see :meth:`.store.Store.probe`."""
        return probe_store(self)

    def _stat(self, key: str) -> os.stat_result | None:
        path = self._path(key)
        with _storage_errors("read", key, self.uri):
            try:
                found = path.stat()
            except OSError as error:
                if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
                    return None
                raise
        # Objects are regular files; opening a pipe would wait for a writer for ever.
        return found if stat.S_ISREG(found.st_mode) else None

    def _path(self, key: str) -> Path:
        check_key(key)
        root = os.path.realpath(self._root)
        path = f"{root.rstrip('/')}/{key}"
        if _has_link(path, len(path) - len(key)):
            path = os.path.realpath(path)
        if not path.startswith(root.rstrip("/") + "/"):
            raise IntegrityError(
                f"{key} is a symbolic link that leaves the storage root {self.uri}; "
                f"copy what it points to into the root",
                code="name_invalid",
            )
        return Path(path)

    def _writable_path(self, key: str) -> Path:
        path = self._path(key)
        with _storage_errors("create the folder of", key, self.uri):
            if make_folders(path.parent):
                self._durable.clear()  # some may have been removed, and are other folders now
        return path

    def _walk(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Folder by folder, no deeper than datasets lie: others may have put anything beside."""
        folders = [(prefix, self._path(prefix))]
        while folders:
            parent, path = folders.pop()
            for name, entry in _entries(path):
                key = f"{parent}/{name}"
                if not is_listed(key):
                    continue
                if entry.is_symlink():
                    found = self._linked(key)
                    if found is not None:
                        yield key, found.st_size
                elif entry.is_dir():
                    if key.count("/") < prefix.count("/") + _DEEPEST:
                        folders.append((key, Path(entry.path)))
                elif entry.is_file():
                    with contextlib.suppress(FileNotFoundError):  # a temporary that has just gone
                        yield key, entry.stat().st_size

    def _linked(self, key: str) -> os.stat_result | None:
        """The file that a link in a listing leads to, or None where it is none of this root.

        Anybody may have put the link there; who asks for it by name is still refused.
        """
        with contextlib.suppress(IntegrityError):
            return self._stat(key)
        return None


def _has_link(path: str, start: int) -> bool:
    """Whether one of the names in a path, from ``start`` on, is a symbolic link.

    Half as many looks as ``realpath`` takes, each of which lets go of the interpreter.
    """
    end = start
    while end < len(path):
        found = path.find("/", end + 1)
        end = len(path) if found < 0 else found
        try:
            mode = os.lstat(path[:end]).st_mode
        except OSError:
            return False  # there is nothing, or nobody may look, and below it neither
        if stat.S_ISLNK(mode):
            return True
    return False


def _entries(folder: Path) -> list[tuple[str, os.DirEntry[str]]]:
    """What lies in a folder; nothing where it is none, or has just gone."""
    try:
        with os.scandir(folder) as entries:
            return [(entry.name, entry) for entry in entries]
    except (FileNotFoundError, NotADirectoryError):
        return []


@contextlib.contextmanager
def _storage_errors(verb: str, key: str, root: str) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StorageError(
                f"could not {verb} {key} under the storage root {root}: a symbolic link on the "
                f"way leads back to itself; remove it, or point it to a file"
            ) from error
        reason = os.strerror(error.errno) if error.errno else type(error).__name__
        raise StorageError(
            f"could not {verb} {key} under the storage root {root}: {reason}; nothing half-written "
            f"was left. Check its space and permissions, and run again"
        ) from error


def _read_range(descriptor: int, start: int, stop: int) -> memoryview:
    """Bytes from ``start`` up to ``stop``, or to the end of the file where that comes first."""
    # Nothing is set aside for bytes that are not there.
    there = max(0, min(stop, os.fstat(descriptor).st_size) - start)
    found = memoryview(bytearray(there))
    done = 0
    while read := os.preadv(descriptor, [found[done:]], start + done):
        done += read
    return found[:done].toreadonly()

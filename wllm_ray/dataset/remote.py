"""Storage roots behind an object-store client: memory, S3, Google Cloud Storage, Azure.

The client retries by itself, so a create-only write whose first answer was lost looks like a
conflict with itself. Every such answer is settled by reading back: the same bytes are success.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import obstore
from obstore.exceptions import AlreadyExistsError as ClientAlreadyExistsError
from obstore.exceptions import BaseError
from obstore.store import MemoryStore, from_url

from wllm_ray.dataset.layout import check_key
from wllm_ray.dataset.store import Buffers, Probe, PutMode, Stored, probe_store
from wllm_ray.errors import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)

__all__ = ["ObjectStore", "open_object_store"]

# One store per name and process: what two callers of memory://x share.
_memory_stores: dict[str, MemoryStore] = {}
_memory_lock = threading.Lock()


def open_object_store(uri: str) -> ObjectStore:
    """Open ``memory://``, ``s3://``, ``gs://`` or ``az://``; credentials come from the client.

    Raises:
        InvalidInputError: The client cannot read the URI (code ``invalid_argument``).
    """
    if uri.startswith("memory://"):
        with _memory_lock:
            return ObjectStore(_memory_stores.setdefault(uri, MemoryStore()), uri)
    try:
        return ObjectStore(from_url(uri), uri)
    except (BaseError, ValueError) as error:
        raise InvalidInputError(
            f"cannot open storage root {uri!r}: {type(error).__name__}", code="invalid_argument"
        ) from error


class ObjectStore:
    """The store contract over an ``obstore`` client."""

    def __init__(self, client: Any, uri: str) -> None:
        self._client = client
        self._uri = uri

    @property
    def uri(self) -> str:
        """The URI that the store was opened with."""
        return self._uri

    def put(self, key: str, data: Buffers, *, mode: PutMode = "create") -> bool:
        """Write one object; see :meth:`.store.Store.put`."""
        check_key(key)
        body = _joined(data)
        if mode == "overwrite":
            with _storage_errors("write", key):
                obstore.put(self._client, key, body, mode="overwrite")
            return True
        try:
            obstore.put(self._client, key, body, mode="create")
        except (BaseError, OSError) as error:
            return self._settle(key, body, error)
        return True

    def put_content(self, prefix: str, suffix: str, data: Buffers) -> Stored:
        """Write one object under its content name; see :meth:`.store.Store.put_content`."""
        body = _joined(data)
        sha256 = hashlib.sha256(body).hexdigest()
        key = f"{prefix}{sha256[:16]}{suffix}"
        self.put(key, body, mode="overwrite")
        return Stored(key, len(body), sha256)

    def get(self, key: str) -> bytes:
        """Read one object; see :meth:`.store.Store.get`."""
        check_key(key)
        try:
            with _storage_errors("read", key):
                return bytes(obstore.get(self._client, key).bytes())
        except FileNotFoundError:
            raise NotFoundError(f"no {key} under {self.uri}", code="object_not_found") from None

    def open(self, key: str) -> BinaryIO:
        """One object as a stream; see :meth:`.store.Store.open`."""
        check_key(key)
        try:
            with _storage_errors("read", key):
                return io.BufferedReader(_Reader(obstore.open_reader(self._client, key), key))
        except FileNotFoundError:
            raise NotFoundError(f"no {key} under {self.uri}", code="object_not_found") from None

    def size(self, key: str) -> int | None:
        """Bytes of one object, or None; see :meth:`.store.Store.size`."""
        check_key(key)
        try:
            with _storage_errors("read", key):
                return int(obstore.head(self._client, key)["size"])
        except FileNotFoundError:
            return None

    def list(self, prefix: str) -> list[tuple[str, int]]:
        """(key, bytes) of every object below a folder; see :meth:`.store.Store.list`."""
        check_key(prefix)
        with _storage_errors("list", prefix):
            batches = obstore.list(self._client, prefix + "/")
            return sorted((one["path"], int(one["size"])) for batch in batches for one in batch)

    def delete(self, key: str) -> None:
        """Remove one object; see :meth:`.store.Store.delete`."""
        check_key(key)
        with contextlib.suppress(FileNotFoundError), _storage_errors("delete", key):
            obstore.delete(self._client, key)

    def local_path(self, key: str) -> Path | None:
        """None: there is no file to map."""
        check_key(key)
        return None

    def probe(self) -> Probe:
        """Find out by trying; see :meth:`.store.Store.probe`."""
        return probe_store(self)

    def _settle(self, key: str, body: bytes, error: Exception) -> bool:
        """Decide what a create-only write came to that did not answer with success."""
        try:
            found = self.get(key)
        except NotFoundError:
            # Also what a 409 between two writers looks like: nothing was stored.
            raise StorageError(
                f"could not write {key} under {self.uri} ({type(error).__name__}) and nothing is "
                f"there; run again"
            ) from error
        if found == body:
            return not isinstance(error, ClientAlreadyExistsError)
        raise AlreadyExistsError(
            f"{key} exists already under {self.uri} with other bytes; it was left as it is"
        ) from error


class _Reader(io.RawIOBase):
    """The client's reader as a raw stream, with our errors."""

    def __init__(self, reader: Any, key: str) -> None:
        self._reader, self._key = reader, key

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with _storage_errors("read", self._key):
            data = self._reader.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _joined(data: Buffers) -> bytes:
    if isinstance(data, bytes):
        return data
    return data.tobytes() if isinstance(data, memoryview) else b"".join(data)


@contextlib.contextmanager
def _storage_errors(verb: str, key: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        raise
    except (BaseError, OSError) as error:
        raise StorageError(
            f"could not {verb} {key}: the object store answered {type(error).__name__}; check the "
            f"credentials and the address, and run again"
        ) from error

"""Storage roots behind an object-store client: memory, S3, Google Cloud Storage, Azure.

The client retries by itself, so a create-only write whose first answer was lost looks like a
conflict with itself. Every such answer is settled by reading back: the same bytes are success.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import obstore
from obstore.exceptions import AlreadyExistsError as ClientAlreadyExistsError
from obstore.exceptions import BaseError

from wllm_ray.dataset.stores.buffers import Buffers, blocks, sha256_of, views
from wllm_ray.dataset.stores.keys import check_key, expect_most, is_listed
from wllm_ray.dataset.stores.probing import probe_store
from wllm_ray.dataset.stores.ranges import check_ranges, covering, cut, expect_whole
from wllm_ray.dataset.stores.remote_client import expect_not_forked, open_client
from wllm_ray.dataset.stores.remote_errors import is_missing_bucket, meaning, storage_errors
from wllm_ray.dataset.stores.store import Probe, PutMode, Stored
from wllm_ray.errors import AlreadyExistsError, NotFoundError, StorageError

__all__ = ["ObjectStore", "open_object_store"]

# Larger objects go up in parts. At most this much of one object is under way at once.
PART_BYTES = 8 << 20
PARTS_IN_FLIGHT = 4
# What a stream asks for at once; a request costs as long as a MiB or two.
_READ_AHEAD_BYTES = 8 << 20
# Seconds before a create that met another one under way (409) is tried again; then it is given up.
_CONFLICT_PAUSES_S = (0.05, 0.1, 0.2, 0.4, 0.8)


def open_object_store(uri: str) -> ObjectStore:
    """Open ``memory://``, ``s3://``, ``gs://`` or ``az://``; credentials come from the client.

    Raises:
        InvalidInputError: The client cannot read the URI (code ``invalid_argument``).
    """
    return ObjectStore(open_client(uri), uri)


class ObjectStore:
    """The store contract over an ``obstore`` client."""

    def __init__(self, client: Any, uri: str) -> None:
        self._opened = client
        self._uri = uri

    @property
    def _client(self) -> Any:
        expect_not_forked(self._uri)
        return self._opened

    @property
    def uri(self) -> str:
        """The URI that the store was opened with."""
        return self._uri

    def put(self, key: str, data: Buffers, *, mode: PutMode = "create") -> bool:
        """Write one object; see :meth:`.store.Store.put`."""
        check_key(key)
        buffers = views(data)
        if mode == "overwrite":
            self._overwrite(key, buffers)
            return True
        with storage_errors("write", key, self.uri):
            return self._create(key, b"".join(buffers))

    def put_content(self, prefix: str, suffix: str, data: Buffers) -> Stored:
        """Write one object under its content name; see :meth:`.store.Store.put_content`.

        Hashed before it is sent, since the name depends on it. Its parts may be left behind,
        unseen, where the process dies: a lifecycle rule of the bucket removes them.
        """
        buffers = views(data)
        sha256 = sha256_of(buffers)
        key = f"{prefix}{sha256[:16]}{suffix}"
        check_key(key)
        self._overwrite(key, buffers)
        return Stored(key, sum(map(len, buffers)), sha256)

    def get(self, key: str, *, most_bytes: int | None = None) -> bytes:
        """Read one object; see :meth:`.store.Store.get`."""
        check_key(key)
        with self._reading(key):
            answer = obstore.get(self._client, key)
            size = int(answer.meta["size"])
            expect_most(key, size, most_bytes)
            data = bytes(answer.bytes())
            expect_whole(key, self.uri, size, len(data))
            return data

    def open(self, key: str) -> BinaryIO:
        """One object as a stream; see :meth:`.store.Store.open`."""
        check_key(key)
        with self._reading(key):
            # Range by range: one request for all of it would end while a slow reader thinks.
            reader = obstore.open_reader(self._client, key, buffer_size=_READ_AHEAD_BYTES)
            return io.BufferedReader(_Reader(reader, key, self.uri))

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes of one object; see :meth:`.store.Store.get_range`."""
        return bytes(self.get_ranges(key, [(start, stop)])[0])

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Several ranges of one object; see :meth:`.store.Store.get_ranges`."""
        check_key(key)
        check_ranges(key, ranges)
        covers = covering(ranges)
        starts, ends = [start for start, _ in covers], [stop for _, stop in covers]
        with self._reading(key):
            # Not joined by the client, which panics where a joined range is past the end.
            answers = obstore.get_ranges(self._client, key, starts=starts, ends=ends, coalesce=0)
        found = [memoryview(answer) for answer in answers]
        for (start, stop), part in zip(covers, found, strict=True):
            expect_whole(key, self.uri, stop - start, len(part))
        return cut(ranges, covers, found)

    def size(self, key: str) -> int | None:
        """Bytes of one object, or None; see :meth:`.store.Store.size`."""
        found = self._head(key)
        return None if found is None else int(found["size"])

    def modified(self, key: str) -> datetime | None:
        """When one object was written, or None; see :meth:`.store.Store.modified`."""
        found = self._head(key)
        return None if found is None else found["last_modified"]

    def list(self, prefix: str) -> list[tuple[str, int]]:
        """(key, bytes) of every object below a folder; see :meth:`.store.Store.list`."""
        check_key(prefix)
        with storage_errors("list", prefix, self.uri):
            batches = obstore.list(self._client, prefix + "/")
            found = ((one["path"], int(one["size"])) for batch in batches for one in batch)
            return sorted(one for one in found if is_listed(one[0]))

    def delete(self, key: str) -> None:
        """Remove one object; see :meth:`.store.Store.delete`."""
        check_key(key)
        with contextlib.suppress(NotFoundError), self._reading(key, "delete"):
            obstore.delete(self._client, key)

    def local_path(self, key: str) -> Path | None:
        """None: there is no file to map."""
        check_key(key)
        return None

    def probe(self) -> Probe:
        """Find out by trying; see :meth:`.store.Store.probe`."""
        return probe_store(self)

    @contextlib.contextmanager
    def _reading(self, key: str, verb: str = "read") -> Iterator[None]:
        with storage_errors(verb, key, self.uri):
            try:
                yield
            except FileNotFoundError as error:
                if is_missing_bucket(error):
                    raise
                raise NotFoundError(f"no {key} under {self.uri}", code="object_not_found") from None

    def _head(self, key: str) -> Any:
        """What the store knows of one object, or None."""
        check_key(key)
        with contextlib.suppress(NotFoundError), self._reading(key):
            return obstore.head(self._client, key)
        return None

    def _overwrite(self, key: str, buffers: Sequence[memoryview]) -> None:
        is_large = sum(map(len, buffers)) > PART_BYTES
        with storage_errors("write", key, self.uri):
            obstore.put(
                self._client,
                key,
                blocks(buffers, PART_BYTES) if is_large else b"".join(buffers),
                mode="overwrite",
                use_multipart=is_large,
                chunk_size=PART_BYTES,
                max_concurrency=PARTS_IN_FLIGHT,
            )

    def _create(self, key: str, body: bytes) -> bool:
        client = self._client
        for pause in (*_CONFLICT_PAUSES_S, None):
            try:
                obstore.put(client, key, body, mode="create")
            except (BaseError, OSError) as error:
                refusal: Exception = error
            else:
                return True
            is_conflict = isinstance(refusal, ClientAlreadyExistsError)
            if self._is_there(key, body, refusal):
                return not is_conflict
            # A conflict over nothing is a 409: another create was under way, and neither may have
            # been stored.
            if pause is None or not is_conflict:
                break
            time.sleep(pause)
        raise StorageError(
            f"could not write {key} under {self.uri}, and nothing is there: {meaning(refusal)}"
        )

    def _is_there(self, key: str, body: bytes, refusal: Exception) -> bool:
        """Whether a create-only write that did not answer with success stored its bytes after all.

        Raises:
            AlreadyExistsError: Other bytes are there.
            StorageError: Nobody can tell.
        """
        try:
            found = self.get(key)
        except NotFoundError:
            return False
        except StorageError:
            raise StorageError(
                f"could not write {key} under {self.uri}, nor read it back: {meaning(refusal)}"
            ) from None
        if found != body:
            raise AlreadyExistsError(
                f"{key} exists already under {self.uri} with other bytes; it was left as it is"
            )
        return True


class _Reader(io.RawIOBase):
    """The client's reader as a raw stream, with our errors."""

    def __init__(self, reader: Any, key: str, uri: str) -> None:
        self._reader, self._key, self._uri = reader, key, uri
        self._left = int(reader.size)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        with storage_errors("read", self._key, self._uri):
            data = self._reader.read(len(buffer))
        self._left -= len(data)
        if not data and len(buffer):
            expect_whole(self._key, self._uri, self._left, 0)
        buffer[: len(data)] = data
        return len(data)

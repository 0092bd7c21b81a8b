"""The storage root behind few primitives, so that writer and reader know no backend.

A store maps keys to immutable byte sequences. A key is a relative name with ``/`` between its
parts. Two backends keep this contract, and one suite in ``tests/dataset`` holds both to it:
:class:`.local.LocalStore`, because a local root must survive a power cut and therefore fsyncs, and
:class:`.remote.ObjectStore` for everything else.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, TypeAlias, runtime_checkable

from wllm_ray.errors import AlreadyExistsError, InvalidInputError, WLLMError

__all__ = ["Buffers", "Probe", "PutMode", "Root", "Store", "Stored", "open_store", "probe_store"]

# collections.abc.Buffer arrives with Python 3.12.
Buffers: TypeAlias = bytes | memoryview | Sequence[bytes | memoryview]
PutMode: TypeAlias = Literal["create", "overwrite"]


@dataclass(frozen=True, slots=True)
class Stored:
    """A file under its content name."""

    key: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Probe:
    """What a storage root can do.

    Attributes:
        writable: An object could be written, read and removed.
        create_only: A second create-only write to the same key was refused. Without this a root
            may have one writer only.
        detail: What was found, in words.
    """

    writable: bool
    create_only: bool
    detail: str


@runtime_checkable
class Store(Protocol):
    """Few primitives over one storage root."""

    @property
    def uri(self) -> str:
        """The root as people write it; never holds credentials."""

    def put(self, key: str, data: Buffers, *, mode: PutMode = "create") -> bool:
        """Write one object; no reader ever sees part of it, and it is durable on return.

        Returns:
            True if this call wrote it; False if ``create`` found the same bytes already there,
            which is what a retry after a lost answer looks like.

        Raises:
            AlreadyExistsError: ``create`` found other bytes.
            StorageError: The root refused or lost the write; nothing half-written is left.
        """

    def put_content(self, prefix: str, suffix: str, data: Buffers) -> Stored:
        """Write one object under ``prefix + first 16 hex digits of its SHA-256 + suffix``.

        Writing the same bytes again is harmless.

        Raises:
            StorageError: The root refused or lost the write.
        """

    def get(self, key: str) -> bytes:
        """Read one object.

        Raises:
            NotFoundError: There is none (code ``object_not_found``).
            StorageError: The root failed to read.
        """

    def open(self, key: str) -> BinaryIO:
        """One object as a stream, for what may not fit into memory.

        Raises:
            NotFoundError: There is none (code ``object_not_found``).
            StorageError: The root failed to read, now or while the stream is read.
        """

    def size(self, key: str) -> int | None:
        """Bytes of one object, or None where there is none."""

    def list(self, prefix: str) -> list[tuple[str, int]]:
        """(key, bytes) of every object in the folder ``prefix`` and below, sorted by key."""

    def delete(self, key: str) -> None:
        """Remove one object; one that is not there is no error."""

    def local_path(self, key: str) -> Path | None:
        """The object's own file where the root is a local folder, to be memory-mapped."""

    def probe(self) -> Probe:
        """Find out by trying whether the root can be written and honours create-only."""


Root: TypeAlias = str | os.PathLike[str] | Store


def open_store(root: Root) -> Store:
    """Open a storage root; touches nothing until it is used.

    Args:
        root: A local path, ``file://…``, ``memory://name`` (the same name is the same store
            within a process), ``s3://…``, ``gs://…``, ``az://…``, or a store, which is returned
            as it is.

    Raises:
        InvalidInputError: A scheme that is not known (code ``invalid_argument``).
    """
    from wllm_ray.dataset.local import LocalStore
    from wllm_ray.dataset.remote import open_object_store

    if not isinstance(root, (str, os.PathLike)):
        return root
    text = os.fspath(root)
    scheme, separator, rest = text.partition("://")
    if not separator:
        return LocalStore(Path(text))
    if scheme == "file":
        return LocalStore(Path(rest))
    if scheme in ("memory", "s3", "gs", "az"):
        return open_object_store(text)
    raise InvalidInputError(
        f"a storage root is a local path, file://, memory://, s3://, gs:// or az://; "
        f"found scheme {scheme!a}",
        code="invalid_argument",
    )


def probe_store(store: Store) -> Probe:
    """Write, read, write again create-only, and remove one small object."""
    key = f"probe-{uuid.uuid4().hex}"
    try:
        store.put(key, b"first")
        if store.get(key) != b"first":
            return Probe(writable=False, create_only=False, detail="the root returns other bytes")
        create_only = _refuses_second_create(store, key)
        store.delete(key)
    except WLLMError as error:
        return Probe(writable=False, create_only=False, detail=error.message)
    detail = "writable, create-only honoured" if create_only else "create-only is not honoured"
    return Probe(writable=True, create_only=create_only, detail=detail)


def _refuses_second_create(store: Store, key: str) -> bool:
    try:
        store.put(key, b"second")
    except AlreadyExistsError:
        return store.get(key) == b"first"
    return False

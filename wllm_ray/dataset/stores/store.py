"""The storage root behind few primitives, so that writer and reader know no backend.

A store maps keys to immutable byte sequences. A key is a relative name with ``/`` between its
parts. Two backends keep this contract, and one suite in ``tests/dataset`` holds both to it:
:class:`.local.LocalStore`, because a local root must survive a power cut and therefore fsyncs, and
:class:`.remote.ObjectStore` for everything else.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import BinaryIO, Literal, Protocol, TypeAlias, cast, runtime_checkable
from urllib.parse import unquote, urlsplit

from wllm_ray.dataset.stores.buffers import Buffers
from wllm_ray.errors import InvalidInputError

__all__ = [
    "Buffers",
    "Probe",
    "PutMode",
    "Root",
    "Store",
    "Stored",
    "expect_lasting",
    "open_store",
    "root_text",
]

PutMode: TypeAlias = Literal["create", "overwrite"]

_SCHEMES = ("file", "memory", "s3", "gs", "az")


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
        create_only: Of two create-only writes at once one was refused, and so was a later one.
            Without this a root may have one writer only.
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

    def get(self, key: str, *, most_bytes: int | None = None) -> bytes:
        """Read one object.

        Args:
            key: Which.
            most_bytes: Refuse a larger one before anything of it is read.

        Raises:
            NotFoundError: There is none (code ``object_not_found``).
            IntegrityError: It is larger (``manifest_invalid``).
            StorageError: The root failed to read.
        """

    def open(self, key: str) -> BinaryIO:
        """One object as a stream, for what may not fit into memory.

        Raises:
            NotFoundError: There is none (code ``object_not_found``).
            StorageError: The root failed to read, now or while the stream is read.
        """

    def get_range(self, key: str, start: int, stop: int) -> bytes:
        """Bytes ``start`` up to ``stop`` (left out) of one object.

        Raises:
            As :meth:`get_ranges`.
        """

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """Several ranges of one object at once, as :meth:`get_range`; neighbours share a request.

        Returns:
            One flat read-only view per range, in the order asked for, as long as asked for.

        Raises:
            InvalidInputError: A range is negative or ends before it starts
                (``invalid_argument``).
            NotFoundError: There is no such object (code ``object_not_found``).
            StorageError: The root failed to read, or the object is shorter.
        """

    def size(self, key: str) -> int | None:
        """Bytes of one object, or None where there is none."""

    def modified(self, key: str) -> datetime | None:
        """When one object was written, by the root's own clock, or None where there is none."""

    def list(self, prefix: str) -> list[tuple[str, int]]:
        """(key, bytes) of every object in the folder ``prefix`` and below, sorted by key.

        Names that are no key, or that cannot be printed, are left out: this library writes none.
        """

    def delete(self, key: str) -> None:
        """Remove one object; one that is not there is no error."""

    def local_path(self, key: str) -> Path | None:
        """The object's own file where the root is a local folder, to be memory-mapped."""

    def probe(self) -> Probe:
        """Find out by trying whether the root can be written and honours create-only."""


Root: TypeAlias = str | os.PathLike[str] | Store


def open_store(root: Root) -> Store:
    """Open a storage root; touches nothing until it is used.

    Credentials and addresses come from the environment, under the names that the stores' own tools
    read: ``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ``AZURE_STORAGE_ACCOUNT_NAME``,
    ``GOOGLE_APPLICATION_CREDENTIALS`` and so on.

    Args:
        root: A local path, ``file:///…``, ``memory://name`` (the same name is the same store
            within a process), ``s3://…``, ``gs://…``, ``az://…``, or a store, which is returned
            as it is.

    Raises:
        InvalidInputError: No root at all, a scheme that is not known, or a URI that holds
            credentials or cannot be read (code ``invalid_argument``).
    """
    from wllm_ray.dataset.stores.local import LocalStore
    from wllm_ray.dataset.stores.remote import open_object_store

    text = root_text(root)
    if text is None:
        return cast("Store", root)
    scheme, separator, _ = text.partition("://")
    if not separator:
        return LocalStore(Path(text))
    return LocalStore(_local_path(text)) if scheme == "file" else open_object_store(text)


def root_text(root: Root) -> str | None:
    """A root as people write it, once it may be shown to everybody; None for an open store.

    Raises:
        InvalidInputError: As :func:`open_store`; what may be a secret is not repeated.
    """
    text = os.fspath(root) if isinstance(root, os.PathLike) else root
    if not isinstance(text, str):
        if hasattr(text, "get_ranges"):
            return None
        raise _refusal(f"found {type(root).__name__}")
    scheme, separator, _ = text.partition("://")
    if not text or "\0" in (unquote(text) if separator else text):
        raise _refusal("found a NUL character in one" if text else "found an empty one")
    if separator:
        if scheme not in _SCHEMES:
            is_word = re.fullmatch(r"[a-zA-Z][a-zA-Z0-9+-]*", scheme)
            raise _refusal(f"found scheme {scheme!a}" if is_word else "found another scheme")
        _expect_plain(scheme, text)
    elif slashed := re.match(rf"({'|'.join(_SCHEMES)}):/", text):
        raise _refusal(f"found one slash: write {slashed[1]}://…, and as str, since Path drops one")
    return text


def expect_lasting(root: str) -> None:
    """Refuse a root that is gone when this process ends, where what is written is to stay.

    Raises:
        InvalidInputError: ``memory://`` (``invalid_argument``).
    """
    if root.startswith("memory://"):
        raise InvalidInputError(
            "memory:// lives in one process and ends with it, and what is written is to stay; name "
            "a folder, s3://, gs:// or az://",
            code="invalid_argument",
        )


def _refusal(found: str) -> InvalidInputError:
    return InvalidInputError(
        f"a storage root is a local path, file://, memory://, s3://, gs:// or az://; {found}",
        code="invalid_argument",
    )


def _expect_plain(scheme: str, uri: str) -> None:
    """A root's URI is shown to everybody, so it may hold nothing but a place.

    What is refused may be a secret, and is not repeated.
    """
    host, _, path = uri.partition("://")[2].partition("/")
    if any(mark in host for mark in "@:") or any(mark in uri for mark in "?#"):
        raise InvalidInputError(
            f"a storage root is {scheme}://PLACE and no more; found a user, password, port, query "
            f"or fragment in one. Credentials and addresses come from the environment "
            f"(AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL, AZURE_STORAGE_…, "
            f"GOOGLE_…)",
            code="invalid_argument",
        )
    if any(unquote(part) in (".", "..") for part in path.split("/")):
        raise InvalidInputError(
            f"expected a storage root without '.' and '..' after {scheme}://",
            code="invalid_argument",
        )


def _local_path(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise InvalidInputError(
            f"expected file:///ABSOLUTE/PATH, with three slashes, found {uri!a}",
            code="invalid_argument",
        )
    return Path(unquote(parts.path))

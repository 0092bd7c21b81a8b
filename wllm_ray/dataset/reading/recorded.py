"""Files that a manifest records: of the recorded size, and what their digests say."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.format.layout import folder
from wllm_ray.dataset.format.manifest import FileEntry, Manifest
from wllm_ray.dataset.reading import maps
from wllm_ray.dataset.reading.staged import expect_listed, expect_size
from wllm_ray.dataset.stores.local import LocalStore
from wllm_ray.dataset.stores.remote import ObjectStore
from wllm_ray.dataset.stores.store import Root, Store, open_store
from wllm_ray.errors import IntegrityError, NotFoundError, NotOfferedError, StorageError
from wllm_ray.lazy import lazy

__all__ = ["RecordedFiles", "Verify"]

Verify: TypeAlias = Literal["lazy", "full", "off"]


class RecordedFiles:
    """The files of one dataset, whole; remembers which were checked already.

    Args:
        store: The storage root.
        manifest: The dataset's manifest, already checked.
        verify: ``off`` skips digests and finiteness; names, sizes and headers are always checked.
        verified: Names of files that need not be checked again.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        verify: Verify,
        verified: AbstractSet[str] = frozenset(),
    ) -> None:
        self.store = store
        self.manifest = manifest
        self._verify = verify
        self._verified = set(verified)

    def __reduce__(self) -> tuple[Any, ...]:
        """What another process needs to read the same dataset; it opens the root by its address.

        Raises:
            NotOfferedError: The root lies in this process's memory (``feature_not_offered``).
        """
        if self.store.uri.startswith("memory://"):
            raise NotOfferedError(
                f"{self.store.uri} lies in the memory of this process, and another one would find "
                f"nothing there; store the dataset under a path or in an object store, or read it "
                f"without worker processes",
                code="feature_not_offered",
            )
        # An address holds no credentials; the other process finds them where this one did.
        by_address = isinstance(self.store, (LocalStore, ObjectStore))
        root: Root = self.store.uri if by_address else self.store
        return _reopened, (type(self), root, self.manifest, self._verify, frozenset(self._verified))

    def check_sizes(self) -> None:
        """Compare every file's size with the manifest, without opening any.

        Raises:
            IntegrityError: ``file_missing``, ``size_mismatch``, or ``name_invalid`` where a link
                leaves the root.
        """
        sizes = dict(self.store.list(folder(self.manifest.dataset_id)))
        for shard in self.manifest.shards:
            for entry in shard.files:
                listed = sizes.get(self.key_of(entry))
                expect_listed(self.store, self.manifest.dataset_id, entry, listed)

    @lazy
    def is_local(self) -> bool:
        """Whether the files lie in a local folder; large ones are mapped there."""
        return self.store.local_path(folder(self.manifest.dataset_id)) is not None

    def is_mapped(self, entry: FileEntry) -> bool:
        """Whether a file is mapped, and not read or fetched."""
        return self.is_local and entry.bytes >= maps.MAPPED_FROM

    def raw(self, entry: FileEntry) -> NDArray[np.uint8]:
        """A whole file of the recorded size, [bytes] uint8, read-only: mapped where it can be.

        Raises:
            IntegrityError: ``size_mismatch``, ``file_missing`` or ``name_invalid``.
            StorageError: The root failed to read.
        """
        path = self.store.local_path(self.key_of(entry))
        return self.fetched(entry) if path is None else self._whole(entry, maps.map_file(path))

    def fetched(self, entry: FileEntry) -> NDArray[np.uint8]:
        """As :meth:`raw`, but never mapped: what becomes of the file later is not seen in it."""
        path = self.store.local_path(self.key_of(entry))
        if path is not None:
            return self._whole(entry, maps.read_file(path))
        with self.as_recorded(entry):
            data = self.store.get(self.key_of(entry))
        return self._whole(entry, np.frombuffer(data, np.uint8))

    def _whole(self, entry: FileEntry, raw: NDArray[np.uint8] | None) -> NDArray[np.uint8]:
        """A file of the recorded size; None stands for one that is not there."""
        found = None if raw is None else raw.size
        expect_size(self.store, self.manifest.dataset_id, entry, found)
        assert raw is not None  # expect_size has refused it
        return raw

    def checked_table(self, entry: FileEntry) -> NDArray[np.uint8]:
        """A whole file that is no features file, its digest checked.

        Raises:
            IntegrityError: As :meth:`raw`, or ``digest_mismatch``.
        """
        data = self.raw(entry)
        if self.is_unchecked(entry):
            self.expect_digest(entry, hashlib.sha256(data.data).hexdigest())
            self._verified.add(entry.name)
        return data

    @contextlib.contextmanager
    def as_recorded(self, entry: FileEntry) -> Iterator[None]:
        """Say of a file that cannot be read whether it is missing, or has another size.

        Raises:
            IntegrityError: ``file_missing`` or ``size_mismatch``.
        """
        try:
            yield
        except (NotFoundError, StorageError):
            found = self.store.size(self.key_of(entry))
            expect_size(self.store, self.manifest.dataset_id, entry, found)
            raise

    def is_unchecked(self, entry: FileEntry) -> bool:
        """Whether digest and values of a file are still to be checked."""
        return self._verify != "off" and entry.name not in self._verified

    def expect_sound(self, entry: FileEntry, sha256: str, *, finite: bool) -> None:
        """Compare what was found in a features file with its record.

        Raises:
            IntegrityError: ``digest_mismatch`` or ``values_not_finite``.
        """
        self.expect_digest(entry, sha256)
        if not finite:
            raise IntegrityError(
                f"{entry.name}: the features hold NaN or infinity, which no writer of this "
                f"format stores; do not use this dataset",
                code="values_not_finite",
            )
        self._verified.add(entry.name)

    def expect_digest(self, entry: FileEntry, found: str) -> None:
        """Compare the digest that was found of a file with its record.

        Raises:
            IntegrityError: ``digest_mismatch``.
        """
        if found != entry.sha256:
            raise IntegrityError(
                f"{self.key_of(entry)}: expected SHA-256 {entry.sha256}, found {found}; the file "
                f"was changed after the dataset was committed, restore it from a copy",
                code="digest_mismatch",
                details={"file": entry.name},
            )

    def key_of(self, entry: FileEntry) -> str:
        """The file's key under the storage root."""
        return f"{folder(self.manifest.dataset_id)}/{entry.name}"


def _reopened(
    kind: type[RecordedFiles],
    root: Root,
    manifest: Manifest,
    verify: Verify,
    verified: AbstractSet[str],
) -> RecordedFiles:
    return kind(open_store(root), manifest, verify, verified)

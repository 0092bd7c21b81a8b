"""A committed dataset's files, opened as the manifest says and checked before anybody sees them."""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wllm_ray.dataset.dtypes import widen
from wllm_ray.dataset.features import decode_features, sha256_and_finite
from wllm_ray.dataset.layout import DATASETS, MANIFEST_NAME, folder, spec_key
from wllm_ray.dataset.manifest import FileEntry, Manifest
from wllm_ray.dataset.rowtable import read_rows
from wllm_ray.dataset.staged import expect_size, standing_manifest
from wllm_ray.dataset.store import Store
from wllm_ray.dataset.trace import Trace, decode_traces
from wllm_ray.errors import IntegrityError, NotFoundError, NotOfferedError

__all__ = ["DatasetFiles", "Verify", "list_datasets", "open_manifest"]

Verify: TypeAlias = Literal["lazy", "full", "off"]

# Shards that are not memory-mapped live in memory: the last few, 64 MiB each by default.
_REMOTE_SHARDS_KEPT = 4
_LISTED = 10


def list_datasets(store: Store) -> list[str]:
    """Ids of the committed datasets under a root, sorted."""
    keys = [key.split("/") for key, _ in store.list(DATASETS)]
    return sorted(parts[1] for parts in keys if parts[2:] == [MANIFEST_NAME])


def open_manifest(store: Store, dataset_id: str) -> Manifest:
    """Read and check the manifest of a committed dataset.

    Raises:
        NotFoundError: It is not committed here (``dataset_not_found``); the message says what is.
        IntegrityError: The manifest is not valid, or is another dataset's.
    """
    manifest = standing_manifest(store, dataset_id)
    if manifest is None:
        raise _not_found(store, dataset_id)
    return manifest


class DatasetFiles:
    """Shard arrays and row tables of one dataset, each checked once, at first access.

    Args:
        store: The storage root.
        manifest: The dataset's manifest, already checked.
        verify: ``off`` skips digests and finiteness; names, sizes and headers are always checked.
    """

    def __init__(self, store: Store, manifest: Manifest, verify: Verify) -> None:
        self.store = store
        self.manifest = manifest
        self._check = verify != "off"
        self._verified: set[str] = set()
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int], NDArray[np.float32]] = OrderedDict()

    def check_sizes(self) -> None:
        """Compare every file's size with the manifest, without opening any.

        Raises:
            IntegrityError: ``file_missing``, ``size_mismatch``, or ``name_invalid`` where a link
                leaves the root.
        """
        sizes = dict(self.store.list(folder(self.manifest.dataset_id)))
        for shard in self.manifest.shards:
            for entry in shard.files:
                found = sizes.get(self._key(entry))
                expect_size(self.store, self.manifest.dataset_id, entry, found)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """[shards + 1] int64: which of all feature rows is the first of each shard."""
        counts = [shard.feature_rows for shard in self.manifest.shards]
        return np.cumsum([0, *counts], dtype=np.int64)

    def row_shape(self, site: int | None) -> tuple[int, ...]:
        """The shape of one feature row: (D,) of one site, (L, D) of all.

        Args:
            site: Its number, or None for all.

        Raises:
            NotOfferedError: All are asked for, and they differ in width
                (``widths_not_representable``).
        """
        manifest = self.manifest
        if site is not None:
            return (manifest.site_widths[site],)
        if manifest.width is None:
            widths = zip(manifest.sites, manifest.site_widths, strict=True)
            listed = ", ".join(f"{name} has {width}" for name, width in widths)
            raise NotOfferedError(
                f"the sites of dataset {manifest.dataset_id!r} differ in width ({listed}), so no "
                f"one array holds them all; ask for one site by its name, or for `to_arrow()`, "
                f"which has a column for each",
                code="widths_not_representable",
            )
        return (len(manifest.sites), manifest.width)

    def features(
        self, shard: int, site: int | None, rows: slice | NDArray[np.int64] = slice(None)
    ) -> NDArray[np.float32]:
        """Feature rows of one shard, [n, D] of one site or [n, L, D] of all, float32.

        Only files that hold what is asked for are opened. A slice is read-only and not copied,
        and mapped where local; but sites that have files of their own are copied into one array.

        Args:
            shard: Its number.
            site: The site's number, or None for all.
            rows: Which of the shard's feature rows.

        Raises:
            NotOfferedError: ``widths_not_representable``.
            IntegrityError: ``size_mismatch``, ``array_invalid``, ``digest_mismatch``,
                ``values_not_finite``, ``file_missing`` or ``name_invalid``.
        """
        self.row_shape(site)
        return widen(self._stored(shard, site, rows), self.manifest.dtype)

    def _stored(
        self, shard: int, site: int | None, rows: slice | NDArray[np.int64]
    ) -> NDArray[Any]:
        if self.manifest.shard_layout == "stacked":
            stacked = self.array(shard, 0)
            return stacked[rows] if site is None else stacked[rows, site]
        if site is not None:
            return self.array(shard, site)[rows]
        parts = [self.array(shard, number)[rows] for number in range(len(self.manifest.sites))]
        return np.stack(parts, axis=1) if len(parts) > 1 else parts[0][:, None]

    def private(self, shard: int, site: int | None) -> NDArray[Any]:
        """A whole shard as stored, but writable: what is written stays in this process.

        Mapped copy-on-write where one local file holds what is asked for.
        """
        if self.manifest.shard_layout == "stacked":
            stacked = self._private_array(shard, 0)
            return stacked if site is None else stacked[:, site]
        if site is None:
            return self._stored(shard, None, slice(None))
        return self._private_array(shard, site)

    def array(self, shard: int, number: int) -> NDArray[Any]:
        """A whole features file as stored (bfloat16 as uint16), read-only; mapped where local.

        Args:
            shard: The shard's number.
            number: Which of the manifest's ``arrays``.

        Raises:
            IntegrityError: As :meth:`features`.
        """
        key = (shard, number)
        with self._lock:
            if key not in self._kept:
                raw = self.raw(self._entry(shard, number))
                self._kept[key] = self.checked(shard, number, raw)
                is_remote = self.store.local_path(folder(self.manifest.dataset_id)) is None
                most = _REMOTE_SHARDS_KEPT * len(self.manifest.arrays)
                if is_remote and len(self._kept) > most:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(key)
            return self._kept[key]

    def _private_array(self, shard: int, number: int) -> NDArray[Any]:
        entry = self._entry(shard, number)
        checked = self.array(shard, number)
        path = self.store.local_path(self._key(entry))
        if path is None or not checked.size:
            return checked.copy()
        raw = np.asarray(np.memmap(path, np.uint8, mode="c"))
        return self._decoded(raw, shard, number)

    def _entry(self, shard: int, number: int) -> FileEntry:
        return self.manifest.shards[shard].features_files[number]

    def rows(self, shard: int) -> pa.RecordBatch:
        """One shard's rows table.

        Raises:
            IntegrityError: ``size_mismatch``, ``digest_mismatch``, ``table_invalid``,
                ``rows_inconsistent``, ``file_missing`` or ``name_invalid``.
        """
        entry = self.manifest.shards[shard].rows_file
        data = self.raw(entry)
        if self._check and entry.name not in self._verified:
            self._expect_digest(entry, hashlib.sha256(data.data).hexdigest())
        return read_rows(data, self.manifest.shards[shard], self.manifest.position)

    def traces(self, shard: int, good: pa.RecordBatch) -> list[Trace]:
        """The traces of a shard, one for each of its good rows; none where there are no traces.

        Args:
            shard: Its number.
            good: The good rows of its rows table.

        Raises:
            IntegrityError: As :meth:`rows`.
        """
        entry = self.manifest.shards[shard].trace_file
        if entry is None:
            return []
        data = self.raw(entry)
        if self._check and entry.name not in self._verified:
            self._expect_digest(entry, hashlib.sha256(data.data).hexdigest())
        return decode_traces(self.manifest, data, good, entry.name)

    def _decoded(self, raw: NDArray[np.uint8], shard: int, number: int) -> NDArray[Any]:
        entry, array = self._entry(shard, number), self.manifest.arrays[number]
        rows = self.manifest.shards[shard].feature_rows
        return decode_features(self.manifest, array, raw, rows, entry.name)

    def checked(self, shard: int, number: int, raw: NDArray[np.uint8]) -> NDArray[Any]:
        """View the array in a whole features file, once all is checked that is to be.

        Args:
            shard: The shard's number.
            number: Which of the manifest's ``arrays``.
            raw: The file, from :meth:`raw`.

        Raises:
            IntegrityError: As :meth:`features`.
        """
        entry = self._entry(shard, number)
        array = self._decoded(raw, shard, number)
        if self._check and entry.name not in self._verified:
            sha256, finite = sha256_and_finite(raw, array, self.manifest.dtype)
            self._expect_digest(entry, sha256)
            if not finite:
                raise IntegrityError(
                    f"{entry.name}: the features hold NaN or infinity, which no writer of this "
                    f"format stores; do not use this dataset",
                    code="values_not_finite",
                )
        return array

    def raw(self, entry: FileEntry) -> NDArray[np.uint8]:
        """A whole file of the recorded size, [bytes] uint8, read-only: mapped where local.

        Raises:
            IntegrityError: ``size_mismatch``, ``file_missing`` or ``name_invalid``.
        """
        key = self._key(entry)
        path = self.store.local_path(key)
        if path is None:
            try:
                raw = np.frombuffer(self.store.get(key), np.uint8)
            except NotFoundError:
                raw = None
        else:
            raw = _mapped(path)
        found = None if raw is None else raw.size
        expect_size(self.store, self.manifest.dataset_id, entry, found)
        assert raw is not None  # expect_size has refused it
        return raw

    def _expect_digest(self, entry: FileEntry, found: str) -> None:
        if found != entry.sha256:
            raise IntegrityError(
                f"{self._key(entry)}: expected SHA-256 {entry.sha256}, found {found}; the file "
                f"was changed after the dataset was committed, restore it from a copy",
                code="digest_mismatch",
                details={"file": entry.name},
            )
        self._verified.add(entry.name)

    def _key(self, entry: FileEntry) -> str:
        return f"{folder(self.manifest.dataset_id)}/{entry.name}"


def _mapped(path: os.PathLike[str]) -> NDArray[np.uint8] | None:
    """Map a file; the path has no link left in it, and one put there meanwhile is refused."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not found.st_size:
            return np.empty(0, np.uint8)
        mapped: Any = np.memmap(file, np.uint8, mode="r")
    return np.asarray(mapped)


def _not_found(store: Store, dataset_id: str) -> NotFoundError:
    names = [key.rpartition("/")[2] for key, _ in store.list(folder(dataset_id))]
    if spec_key(dataset_id).rpartition("/")[2] in names:
        receipts = sum(name.endswith(".receipt.json") for name in names)
        found = (
            f"it was begun but not committed: {receipts} shard(s) are staged. Run the same job "
            f"again, it resumes there and commits"
        )
    elif store.local_path(DATASETS) is not None and not Path(store.uri).is_dir():
        found = "there is no such folder; check the path of the storage root"
    else:
        ids = list_datasets(store)
        more = f" and {len(ids) - _LISTED} more" if len(ids) > _LISTED else ""
        found = f"committed there: {', '.join(ids[:_LISTED]) or 'none'}{more}"
    return NotFoundError(
        f"no committed dataset {dataset_id!r} under {store.uri}; {found}",
        code="dataset_not_found",
        details={"dataset_id": dataset_id},
    )

"""A committed dataset's files, opened as the manifest says and checked before anybody sees them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wllm_ray.dataset.format.abandoned import abandoned_mark
from wllm_ray.dataset.format.dtypes import widen
from wllm_ray.dataset.format.features import decode_features, sha256_and_finite
from wllm_ray.dataset.format.layout import DATASETS, MANIFEST_NAME, folder, spec_key
from wllm_ray.dataset.format.manifest import FileEntry, Manifest
from wllm_ray.dataset.format.trace import Trace, decode_traces
from wllm_ray.dataset.reading import maps
from wllm_ray.dataset.reading.cache import BoundedCache
from wllm_ray.dataset.reading.decided import is_abandoned
from wllm_ray.dataset.reading.ranged import RangedFile, open_ranged
from wllm_ray.dataset.reading.recorded import RecordedFiles, Verify
from wllm_ray.dataset.reading.rowtable import read_rows
from wllm_ray.dataset.reading.staged import standing_manifest
from wllm_ray.dataset.stores.store import Store
from wllm_ray.errors import NotFoundError, NotOfferedError
from wllm_ray.lazy import lazy

__all__ = ["DatasetFiles", "Verify", "list_datasets", "open_manifest"]

# What is kept of files that are not mapped: four shards of the default size, so that a thread
# or two that read ahead find theirs, and little beside the batches that training holds anyway.
KEPT_BYTES = 256 << 20
_LISTED = 10


def list_datasets(store: Store) -> list[str]:
    """Ids of the committed datasets under a root, sorted."""
    found = [(key.split("/"), size) for key, size in store.list(DATASETS)]
    return sorted(
        parts[1]
        for parts, size in found
        # By its size the mark of one that was given up is told from a manifest.
        if parts[2:] == [MANIFEST_NAME] and size != len(abandoned_mark(parts[1]))
    )


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


class DatasetFiles(RecordedFiles):
    """Shard arrays and row tables of one dataset, each checked once, at first access.

    Local files are mapped, small ones read. Others are fetched whole at first access, which checks
    them. What is not mapped is kept within :data:`KEPT_BYTES`; of what was fetched and checked and
    is not kept any more, only the wanted bytes are fetched. Any number of threads may read at once.
    """

    @lazy
    def cache(self) -> BoundedCache:
        """What was read or fetched, by its bytes."""
        return BoundedCache(KEPT_BYTES)

    @lazy
    def _maps(self) -> BoundedCache:
        """Features files that are mapped, by their number: they take up no memory."""
        return BoundedCache(maps.MOST_MAPS)

    @lazy
    def stay_in_place(self) -> bool:
        """Whether all features files are local, and all of them can be kept at once."""
        entries = [entry for shard in self.manifest.shards for entry in shard.features_files]
        read = [entry.bytes for entry in entries if not self.is_mapped(entry)]
        few = len(entries) - len(read) <= self._maps.most
        return self.is_local and few and sum(read) <= self.cache.most

    @lazy
    def starts(self) -> NDArray[np.int64]:
        """[shards + 1] int64: which of all feature rows is the first of each shard."""
        counts = [shard.feature_rows for shard in self.manifest.shards]
        return np.cumsum([0, *counts], dtype=np.int64)

    @lazy
    def _rows_each(self) -> int:
        """How many feature rows all shards have but a last one that has fewer; 0: they differ."""
        *others, last = np.diff(self.starts).tolist()
        each = others[0] if others else last
        return each if last <= each and set(others) <= {each} else 0

    def shards_of(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """[B] int64: in which shard each of some feature rows lies, [B] int64, in any order."""
        if self._rows_each:  # dividing is ten times as fast as looking
            return numbers // self._rows_each
        return self.starts.searchsorted(numbers, side="right") - 1

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
        self,
        shard: int,
        site: int | None,
        rows: slice | NDArray[np.int64] = slice(None),
        *,
        keep: bool = False,
    ) -> NDArray[np.float32]:
        """As :meth:`stored`, as float32, which holds every stored value exactly."""
        return widen(self.stored(shard, site, rows, keep=keep), self.manifest.dtype)

    def stored(
        self,
        shard: int,
        site: int | None,
        rows: slice | NDArray[np.int64] = slice(None),
        *,
        keep: bool = False,
    ) -> NDArray[Any]:
        """Feature rows of one shard as stored (bfloat16 as uint16), [n, D] or [n, L, D].

        Only files that hold what is asked for are opened. A slice is read-only and not copied,
        and mapped where local; but sites that have files of their own are copied into one array.

        Args:
            shard: Its number.
            site: The site's number, or None for all.
            rows: Which of the shard's feature rows.
            keep: Whether more of them will be wanted soon, so that a file which is fetched had
                better be fetched whole and kept.

        Raises:
            NotOfferedError: ``widths_not_representable``.
            IntegrityError: ``size_mismatch``, ``array_invalid``, ``digest_mismatch``,
                ``values_not_finite``, ``file_missing`` or ``name_invalid``.
            StorageError: The root failed to read.
        """
        self.row_shape(site)
        if self.manifest.shard_layout == "stacked":
            return self._part(shard, 0, rows, site, keep=keep)
        if site is not None:
            return self._part(shard, site, rows, None, keep=keep)
        numbers = range(len(self.manifest.sites))
        parts = [self._part(shard, number, rows, None, keep=keep) for number in numbers]
        return np.stack(parts, axis=1) if len(parts) > 1 else parts[0][:, None]

    def _part(
        self,
        shard: int,
        number: int,
        rows: slice | NDArray[np.int64],
        column: int | None,
        *,
        keep: bool,
    ) -> NDArray[Any]:
        if self._comes_whole(shard, number, keep=keep):
            array = self.array(shard, number)
            return array[rows] if column is None else array[rows, column]
        every = np.arange(self.manifest.shards[shard].feature_rows)
        with self.as_recorded(self._entry(shard, number)):
            return self._ranged(shard, number).pick(every[rows], column)

    def _comes_whole(self, shard: int, number: int, *, keep: bool) -> bool:
        """Whether a features file is read as a whole, and not by ranges."""
        if self.is_local or (shard, number) in self.cache:
            return True
        entry = self._entry(shard, number)
        return entry.bytes <= self.cache.most and (keep or self.is_unchecked(entry))

    def private(self, shard: int, site: int | None) -> NDArray[Any]:
        """A whole shard as stored, but writable: what is written stays in this process.

        Mapped copy-on-write where one local file holds what is asked for.
        """
        if self.manifest.shard_layout == "stacked":
            stacked = self._private_array(shard, 0)
            return stacked if site is None else stacked[:, site]
        if site is not None:
            return self._private_array(shard, site)
        stored = self.stored(shard, None)
        return stored if stored.flags.writeable else self._private_array(shard, 0)[:, None]

    def _private_array(self, shard: int, number: int) -> NDArray[Any]:
        checked = self.array(shard, number)
        path = self.store.local_path(self.key_of(self._entry(shard, number)))
        raw = None if path is None or not checked.size else maps.map_privately(path)
        return checked.copy() if raw is None else self._decoded(raw, shard, number)

    def array(self, shard: int, number: int) -> NDArray[Any]:
        """A whole features file as stored (bfloat16 as uint16), read-only; mapped where it can be.

        Args:
            shard: The shard's number.
            number: Which of the manifest's ``arrays``.

        Raises:
            As :meth:`stored`.
        """
        is_mapped = self.is_mapped(entry := self._entry(shard, number))
        cache, size = (self._maps, 1) if is_mapped else (self.cache, entry.bytes)
        key = (shard, number)
        return cache.get(key, lambda: (self.checked(shard, number, self.raw(entry)), size))

    def _ranged(self, shard: int, number: int) -> RangedFile:
        """A features file to be read by ranges, checked if it is not yet."""
        key = ("ranged", shard, number)
        return self.cache.get(key, lambda: (self._opened_ranged(shard, number), 0))

    def _opened_ranged(self, shard: int, number: int) -> RangedFile:
        entry, rows = self._entry(shard, number), self.manifest.shards[shard].feature_rows
        array, key = self.manifest.arrays[number], self.key_of(entry)
        file = open_ranged(self.manifest, array, self.store, key, size=entry.bytes, rows=rows)
        if self.is_unchecked(entry):
            sha256, finite = file.sha256_and_finite()
            self.expect_sound(entry, sha256, finite=finite)
        return file

    def rows(self, shard: int) -> pa.RecordBatch:
        """One shard's rows table.

        Raises:
            IntegrityError: ``size_mismatch``, ``digest_mismatch``, ``table_invalid``,
                ``rows_inconsistent``, ``file_missing`` or ``name_invalid``.
        """
        data = self.checked_table(self.manifest.shards[shard].rows_file)
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
        return decode_traces(self.manifest, self.checked_table(entry), good, entry.name)

    def checked(self, shard: int, number: int, raw: NDArray[np.uint8]) -> NDArray[Any]:
        """View the array in a whole features file, once all is checked that is to be.

        Args:
            shard: The shard's number.
            number: Which of the manifest's ``arrays``.
            raw: The file, from :meth:`raw`.

        Raises:
            IntegrityError: As :meth:`stored`.
        """
        entry = self._entry(shard, number)
        array = self._decoded(raw, shard, number)
        if self.is_unchecked(entry):
            sha256, finite = sha256_and_finite(raw, array, self.manifest.dtype)
            self.expect_sound(entry, sha256, finite=finite)
        return array

    def _decoded(self, raw: NDArray[np.uint8], shard: int, number: int) -> NDArray[Any]:
        entry, array = self._entry(shard, number), self.manifest.arrays[number]
        rows = self.manifest.shards[shard].feature_rows
        return decode_features(self.manifest, array, raw, rows, entry.name)

    def _entry(self, shard: int, number: int) -> FileEntry:
        return self.manifest.shards[shard].features_files[number]


def _not_found(store: Store, dataset_id: str) -> NotFoundError:
    names = [key.rpartition("/")[2] for key, _ in store.list(folder(dataset_id))]
    if is_abandoned(store, dataset_id):
        found = "it was begun, and given up before it was committed"
    elif spec_key(dataset_id).rpartition("/")[2] in names:
        receipts = sum(name.endswith(".receipt.json") for name in names)
        found = (
            f"it was begun but not committed; shards staged so far: {receipts}. Run the same job "
            f"or merge again, it resumes there and commits"
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

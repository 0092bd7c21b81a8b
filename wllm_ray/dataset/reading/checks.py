"""Every look that `verify` takes at a dataset's files, and what each finds."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from wllm_ray.dataset.format.documents import read_receipt
from wllm_ray.dataset.format.layout import MANIFEST_NAME, SPEC_NAME, folder, receipt_key, spec_key
from wllm_ray.dataset.format.manifest import Receipt, ShardEntry, document_bytes
from wllm_ray.dataset.reading.decided import get_document
from wllm_ray.dataset.reading.files import DatasetFiles
from wllm_ray.dataset.reading.recheck import check_manifest, check_rows, check_traces, check_vectors
from wllm_ray.dataset.reading.repeated import RowIds
from wllm_ray.dataset.reading.rowtable import good_rows
from wllm_ray.digest import sha256_hex
from wllm_ray.errors import IntegrityError, NotFoundError, WLLMError

__all__ = ["Check", "Checker", "Fault"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is not what its record says."""

    code: str
    file: str
    message: str


@dataclass(frozen=True, slots=True)
class Check:
    """One look at one file.

    Attributes:
        file: Which.
        bytes: How much of it is read.
        run: Raises what is wrong.
        is_free: Most of it runs without the interpreter lock.
    """

    file: str
    bytes: int
    run: Callable[[], object]
    is_free: bool = False

    def fault(self) -> Fault | None:
        """What is wrong, or None."""
        try:
            self.run()
        except NotFoundError as error:
            return self._fault("file_missing", error)
        except WLLMError as error:
            return self._fault(error.code, error)
        return None

    def _fault(self, code: str, error: WLLMError) -> Fault:
        """Without the file's name where the message begins with it: a fault has it already."""
        return Fault(
            code, self.file, re.sub(rf"^(\S*/)?{re.escape(self.file)}: ", "", error.message)
        )


class Checker:
    """Looks at one file after the other, and remembers what only all of them together tell.

    Args:
        files: The dataset's.

    Attributes:
        without_record: (key, bytes) of what lies in the dataset's folder and no record names; no
            fault, and known once :meth:`faults_between_files` was asked.
    """

    def __init__(self, files: DatasetFiles) -> None:
        self._files, self._store, self._manifest = files, files.store, files.manifest
        self._spec = files.manifest.spec()
        self._ids = RowIds()
        self._receipts: dict[int, Receipt] = {}
        self.without_record: list[tuple[str, int]] = []

    def checks(self) -> Iterator[Check]:
        """What is to be done, in the order of the files."""
        yield Check(SPEC_NAME, 0, self._spec_document)
        for shard in self._manifest.shards:
            key = receipt_key(self._manifest.dataset_id, shard.shard)
            yield Check(key.rpartition("/")[2], 0, partial(self._receipt, key, shard))
            rows, trace = shard.rows_file, shard.trace_file
            yield Check(rows.name, rows.bytes, partial(self._rows, shard))
            for number, entry in enumerate(shard.features_files):
                run = partial(self._features, shard, number)
                yield Check(entry.name, entry.bytes, run, is_free=True)
            if trace is not None:
                yield Check(trace.name, trace.bytes, partial(self._traces, shard))

    def faults_between_files(self, *, is_sound: bool) -> list[Fault]:
        """What is wrong although each file is right.

        Args:
            is_sound: No fault was found so far.
        """
        checks = [Check(folder(self._manifest.dataset_id), 0, self._listing)]
        if is_sound:
            again = partial(check_manifest, self._manifest, self._receipts)
            checks += [Check(MANIFEST_NAME, 0, again), *self._trace_checks()]
        found = (check.fault() for check in checks)
        return [*self._repeated_ids(), *(fault for fault in found if fault)]

    def _listing(self) -> None:
        dataset_id = self._manifest.dataset_id
        known = {f"{folder(dataset_id)}/{name}" for name in (SPEC_NAME, MANIFEST_NAME)}
        for shard in self._manifest.shards:
            known.add(receipt_key(dataset_id, shard.shard))
            known.update(f"{folder(dataset_id)}/{entry.name}" for entry in shard.files)
        there = sorted(self._store.list(folder(dataset_id)))
        self.without_record = [one for one in there if one[0] not in known]

    def _spec_document(self) -> None:
        if get_document(self._store, spec_key(self._manifest.dataset_id)) != document_bytes(
            self._spec
        ):
            raise IntegrityError(
                "spec.json is not the spec that the manifest was made from", code="digest_mismatch"
            )

    def _receipt(self, key: str, shard: ShardEntry) -> None:
        data = get_document(self._store, key)
        if sha256_hex(data) != shard.receipt_sha256:
            raise IntegrityError(
                "the receipt is not the one that the manifest was made from",
                code="digest_mismatch",
            )
        self._receipts[shard.shard] = read_receipt(data, self._spec, shard.shard)

    def _rows(self, shard: ShardEntry) -> None:
        batch = self._files.rows(shard.shard)
        check_rows(batch, shard, self._manifest.position)
        self._ids.add(shard.shard, batch.column("id").to_pylist())

    def _ids_of(self, shard: int) -> list[str]:
        ids: list[str] = self._files.rows(shard).column("id").to_pylist()
        return ids

    def _repeated_ids(self) -> Iterator[Fault]:
        """One fault for each rows table with an id that was there before."""
        shards = self._manifest.shards
        found = self._ids.repeated(self._ids_of)
        for table, group in groupby(found, key=lambda one: one[2].table):
            (row_id, *places), *more = group
            first, second = (shards[place.table].first_row + place.row for place in places)
            yield Fault(
                "rows_inconsistent",
                shards[table].rows_file.name,
                f"rows {first} and {second} have the same id {row_id!a}"
                + (f", and {len(more)} more such" if more else ""),
            )

    def _features(self, shard: ShardEntry, number: int) -> None:
        entry = shard.features_files[number]
        array = self._files.checked(shard.shard, number, self._files.raw(entry))
        check_vectors(entry.name, array, self._manifest.dtype)

    def _traces(self, shard: ShardEntry) -> None:
        try:
            good = good_rows(self._files.rows(shard.shard))
        except WLLMError:
            # A fault of the rows table, whose own check names it: not of this file as well.
            assert shard.trace_file is not None, "only shards with traces come here"
            self._files.checked_table(shard.trace_file)
        else:
            self._files.traces(shard.shard, good)

    def _trace_checks(self) -> Iterator[Check]:
        for shard in self._manifest.shards if self._manifest.trace else ():
            for number, entry in enumerate(shard.features_files):
                yield Check(entry.name, 0, partial(check_traces, self._files, shard.shard, number))

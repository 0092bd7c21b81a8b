"""The good rows of a dataset, of which as little becomes Python objects as can be."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wllm_ray.dataset.format.rows import read_failure
from wllm_ray.dataset.format.trace import Trace
from wllm_ray.dataset.reading.files import DatasetFiles
from wllm_ray.dataset.reading.rowtable import good_rows, token_arrays
from wllm_ray.digest import parse_json
from wllm_ray.errors import IntegrityError, InvalidInputError
from wllm_ray.lazy import lazy
from wllm_ray.records import RowFailure

__all__ = ["FailedRow", "Labels", "Origins", "RowIndex"]

_Read = TypeVar("_Read")

# Tables that are read at once; enough to hide the latency of an object store.
_THREADS = 8


class FailedRow(RowFailure):
    """Why a row has no activation, and its index among all input rows."""

    index: int


@dataclass(frozen=True, eq=False)
class Origins:
    """Where feature rows come from.

    Attributes:
        ids: The ids of some rows, an Arrow column; nothing is made of those that nobody wants.
        places: [B] int64, which of these each feature row belongs to.
        rows: [B] int64, the number of that row among all good rows.
        index_in_row: [B] int64, which of the row's feature rows it is, from 0.
    """

    ids: pa.Array
    places: NDArray[np.int64]
    rows: NDArray[np.int64]
    index_in_row: NDArray[np.int64]

    def __reduce__(self) -> tuple[Any, ...]:
        """Only the ids that are needed travel to another process."""
        ids = self.ids.take(pa.array(self.places))
        return Origins, (ids, np.arange(len(ids)), self.rows, self.index_in_row)

    @lazy
    def row_ids(self) -> list[str]:
        """For each feature row, the id of the row that it belongs to."""
        wanted = self.ids.take(pa.array(self.places))
        ids: list[str] = wanted.to_numpy(zero_copy_only=False).tolist()
        return ids


class Labels(NamedTuple):
    """Says of feature rows to which rows they belong.

    Attributes:
        ids: Ids of consecutive good rows, an Arrow column.
        offsets: [rows + 1] int64: where the feature rows of each begin, among all of the dataset.
        first: Which of all good rows is the first of these.
    """

    ids: pa.Array
    offsets: NDArray[np.int64]
    first: int

    def of(self, numbers: NDArray[np.int64]) -> Origins:
        """Of feature rows in any order.

        Args:
            numbers: [B] int64, among all feature rows; each must belong to one of these rows.
        """
        start = int(self.offsets[0])
        if len(self.ids) == self.offsets[-1] - start:  # one each
            places, index_in_row = numbers - start, np.zeros(len(numbers), np.int64)
        else:
            places = self.offsets.searchsorted(numbers, side="right") - 1
            index_in_row = numbers - self.offsets[places]
        return Origins(self.ids, places, places + self.first, index_in_row)


class RowIndex:
    """What the rows tables say, read when it is first asked for.

    Args:
        files: The dataset's files.
    """

    def __init__(self, files: DatasetFiles) -> None:
        self._files = files

    def __reduce__(self) -> tuple[Any, ...]:
        return RowIndex, (self._files,)

    def good(self, shard: int) -> pa.RecordBatch:
        """The good rows of one shard, as its rows table has them."""
        return self._table(shard)[0]

    def labels(self, shard: int) -> Labels:
        """Of the feature rows of one shard."""
        return self._table(shard)[1]

    def _table(self, shard: int) -> tuple[pa.RecordBatch, Labels]:
        return self._files.cache.get(("rows", shard), lambda: self._read_table(shard))

    def _read_table(self, shard: int) -> tuple[tuple[pa.RecordBatch, Labels], int]:
        entry, every = self._files.manifest.shards[shard], self._files.rows(shard)
        good = good_rows(every) if entry.rows_failed else every  # choosing copies
        offsets = np.zeros(good.num_rows + 1, np.int64)
        np.cumsum(good.column("length").to_numpy(), out=offsets[1:])
        offsets += self._files.starts[shard]
        labels = Labels(good.column("id"), offsets, int(self._first_rows[shard]))
        return (good, labels), entry.rows_file.bytes

    @lazy
    def all_labels(self) -> Labels:
        """Of all feature rows: some 30 bytes for each row."""
        parts = self._of_all_shards(self._copied_labels)
        offsets = np.concatenate([[0], *(part.offsets[1:] for part in parts)]).astype(np.int64)
        offsets.flags.writeable = False
        return Labels(pa.concat_arrays([part.ids for part in parts]), offsets, 0)

    def _copied_labels(self, shard: int) -> Labels:
        """Labels that do not hold on to the rest of the table: Arrow copies what it joins."""
        labels = self.labels(shard)
        return labels._replace(ids=pa.concat_arrays([labels.ids, labels.ids[:0]]))

    def row_ids(self) -> list[str]:
        """Ids of the good rows."""
        ids: list[str] = self.all_labels.ids.to_pylist()
        return ids

    def number_of(self, row_id: str) -> int:
        """Which of the good rows this is.

        Raises:
            InvalidInputError: It is none of them, or no text (``invalid_argument``).
        """
        if not isinstance(row_id, str):
            raise InvalidInputError(
                f"a row id is a text, found {row_id!r}", code="invalid_argument"
            )
        if row_id in self._numbers:
            return self._numbers[row_id]
        failure = self.failures.get(row_id)
        why = f"it failed with {failure.code}" if failure else "there is no such row"
        raise InvalidInputError(
            f"row {row_id!a} has no activation in dataset {self._files.manifest.dataset_id!r}: "
            f"{why}",
            code="invalid_argument",
        )

    def trace(self, row_id: str) -> Trace:
        """The trace of a row, in a dataset that has traces.

        Raises:
            InvalidInputError: As :meth:`number_of`.
            IntegrityError: The traces are damaged.
        """
        number = self.number_of(row_id)
        shard = int(np.searchsorted(self._first_rows, number, side="right")) - 1
        traces = self._files.cache.get(("traces", shard), lambda: self._read_traces(shard))
        return traces[number - int(self._first_rows[shard])]

    def _read_traces(self, shard: int) -> tuple[list[Trace], int]:
        entry = self._files.manifest.shards[shard].trace_file
        assert entry is not None, "only datasets with traces come here"
        return self._files.traces(shard, self.good(shard)), entry.bytes

    def tables(self) -> Sequence[pa.RecordBatch]:
        """The good rows of every shard."""
        return self._of_all_shards(self.good)

    def metadata(self) -> list[dict[str, Any]]:
        """Metadata of the good rows."""
        found: list[dict[str, Any]] = []
        for shard, batch in enumerate(self.tables()):
            with self._naming(shard):
                found += map(parse_json, batch.column("metadata").to_pylist())
        return found

    def token_ids(self) -> list[NDArray[np.int32]]:
        """Token ids of the good rows, each [T] int32."""
        ids = (one for batch in self.tables() for one in token_arrays(batch))
        return [one for one in ids if one is not None]

    def request_digests(self) -> list[str]:
        """Request digests of the good rows, as hex."""
        digests = (batch.column("request_sha256").to_pylist() for batch in self.tables())
        return [digest.hex() for of_shard in digests for digest in of_shard]

    @lazy
    def failures(self) -> dict[str, FailedRow]:
        """Row id → why the row failed."""
        failed: dict[str, FailedRow] = {}
        for shard in self._files.manifest.shards:
            if not shard.rows_failed:
                continue
            batch = self._files.rows(shard.shard)
            columns = (batch.column(name).to_pylist() for name in ("id", "row", "failure"))
            with self._naming(shard.shard):
                failed |= {
                    row_id: FailedRow(index=index, **read_failure(text).model_dump())
                    for row_id, index, text in zip(*columns, strict=True)
                    if text is not None
                }
        return failed

    @lazy
    def _first_rows(self) -> NDArray[np.int64]:
        """[shards] int64: which of all good rows is the first of each shard."""
        counts = [shard.rows - shard.rows_failed for shard in self._files.manifest.shards]
        return np.cumsum([0, *counts[:-1]], dtype=np.int64)

    @lazy
    def _numbers(self) -> dict[str, int]:
        numbers = {row_id: number for number, row_id in enumerate(self.row_ids())}
        if len(numbers) != self._files.manifest.rows_ok:
            raise IntegrityError("a row id occurs twice in the dataset", code="rows_inconsistent")
        return numbers

    @contextlib.contextmanager
    def _naming(self, shard: int) -> Iterator[None]:
        """Say of a text that cannot be read in which rows table it is."""
        try:
            yield
        except (IntegrityError, InvalidInputError) as error:
            name = self._files.manifest.shards[shard].rows_file.name
            code = error.code if isinstance(error, IntegrityError) else "table_invalid"
            raise IntegrityError(f"{name}: {error.message}", code=code) from None

    def _of_all_shards(self, read: Callable[[int], _Read]) -> list[_Read]:
        with ThreadPoolExecutor(_THREADS) as pool:
            return list(pool.map(read, range(len(self._files.manifest.shards))))

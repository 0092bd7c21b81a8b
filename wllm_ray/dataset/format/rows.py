"""The rows table of a shard, as bytes.

The encoder is deterministic. The decoder trusts nothing: a table must have exactly the schema
below.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from wllm_ray.dataset.format.arrow import read_batch
from wllm_ray.digest import canonical_text, parse_json, rows_digest, token_digests
from wllm_ray.errors import ROW_FAILURE_CODES, IntegrityError, InvalidInputError
from wllm_ray.lazy import lazy
from wllm_ray.records import RowFailure

__all__ = [
    "OK",
    "ROWS_SCHEMA",
    "RowColumns",
    "decode_rows",
    "encode_rows",
    "read_failure",
    "rows_sha256",
]

OK = "ok"

ROWS_SCHEMA = pa.schema(
    [
        pa.field("row", pa.int64(), nullable=False),
        pa.field("id", pa.large_string(), nullable=False),
        pa.field("metadata", pa.large_string(), nullable=False),
        pa.field("request_sha256", pa.binary(32), nullable=False),
        pa.field("token_ids", pa.large_list(pa.field("item", pa.int32(), nullable=False))),
        pa.field("token_sha256", pa.binary(32)),
        pa.field("status", pa.large_string(), nullable=False),
        pa.field("failure", pa.large_string()),
        pa.field("offset", pa.int64()),
        pa.field("length", pa.int64(), nullable=False),
    ],
    metadata={"format": "wllm_ray.rows", "format_version": "1"},
)


@dataclass(frozen=True, eq=False)
class RowColumns:
    """What became of the rows of one shard, column by column.

    Rows come in millions, and this way few Python objects are made for each.

    Attributes:
        first_row: Number of the first among all input rows; the others follow.
        ids: Their ids.
        metadata: Their metadata as canonical JSON.
        request_digests: Their request digests.
        token_ids: Their ids, [T] int32 each, or None where a row failed before it had any.
        failures: Place in the shard → why, for the rows that have no feature rows.
        lengths: [R] int64, feature rows of each; 0 where it failed.
    """

    first_row: int
    ids: Sequence[str]
    metadata: Sequence[str]
    request_digests: Sequence[str]
    token_ids: Sequence[NDArray[np.int32] | None]
    failures: Mapping[int, RowFailure]
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)

    @lazy
    def token_digests(self) -> list[str | None]:
        """Of the token ids, where there are any."""
        return token_digests(self.token_ids)

    @lazy
    def statuses(self) -> list[str]:
        """``ok`` or the failure's code."""
        statuses = [OK] * len(self)
        for place, failure in self.failures.items():
            statuses[place] = failure.code
        return statuses

    @lazy
    def is_good(self) -> NDArray[np.bool_]:
        """[R] bool: has feature rows."""
        is_good = np.ones(len(self), np.bool_)
        is_good[list(self.failures)] = False
        return is_good

    @property
    def offsets(self) -> NDArray[np.int64]:
        """[R] int64: where the feature rows of each begin in the shard; 0 where it failed."""
        return np.where(self.is_good, np.cumsum(self.lengths) - self.lengths, 0)


def encode_rows(rows: RowColumns) -> memoryview:
    """The rows table of one shard as an Arrow IPC file with one record batch."""
    failures: list[str | None] = [None] * len(rows)
    for place, failure in rows.failures.items():
        failures[place] = canonical_text(failure.model_dump())
    numbers = np.arange(rows.first_row, rows.first_row + len(rows), dtype=np.int64)
    batch = pa.record_batch(
        [
            pa.array(numbers),
            pa.array(rows.ids, pa.large_string()),
            pa.array(rows.metadata, pa.large_string()),
            _digest_column(rows.request_digests),
            _token_column(rows.token_ids),
            _digest_column(rows.token_digests),
            pa.array(rows.statuses, pa.large_string()),
            pa.array(failures, pa.large_string()),
            pa.array(rows.offsets, mask=~rows.is_good),
            pa.array(rows.lengths),
        ],
        schema=ROWS_SCHEMA,
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, ROWS_SCHEMA) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def rows_sha256(rows: RowColumns) -> str:
    """The shard rows digest of FORMAT.md."""
    return rows_digest(zip(rows.request_digests, rows.token_digests, rows.statuses, strict=True))


def decode_rows(data: Any, name: str) -> pa.RecordBatch:
    """Read a rows table.

    Args:
        data: The file: bytes or a memory map.
        name: The file, for the message.

    Raises:
        IntegrityError: Not an Arrow file with one batch of exactly this schema
            (``table_invalid``), or one that is compressed, or holds an empty id or a token id
            below 0.
    """
    batch = read_batch(data, ROWS_SCHEMA, name, code="table_invalid")
    if holes := _columns_with_holes(batch):
        raise IntegrityError(
            f"{name}: the columns {holes} hold nulls, which they must not", code="table_invalid"
        )
    if wrong := _out_of_range(batch):
        raise IntegrityError(
            f"{name}: expected ids that are not empty and token ids from 0, found {wrong}; the "
            f"dataset was written wrongly or edited, do not use it",
            code="table_invalid",
        )
    return batch


def _columns_with_holes(batch: pa.RecordBatch) -> list[str]:
    """Arrow itself checks no value against ``nullable``."""
    found = [
        field.name for field in ROWS_SCHEMA if not field.nullable and batch[field.name].null_count
    ]
    return found + (["token_ids"] if batch["token_ids"].values.null_count else [])


def _out_of_range(batch: pa.RecordBatch) -> str | None:
    """What must not be; tables have millions of rows, so only all of a column is looked at."""
    if pc.min(pc.binary_length(batch["id"])).as_py() == 0:
        return "an empty id"
    tokens = batch["token_ids"]
    # Of a row that has none there may be values all the same, which mean nothing.
    for values in (tokens.values, tokens.flatten()):
        lowest = pc.min(values).as_py()
        if lowest is None or lowest >= 0:
            return None
    return f"the token id {lowest}"


def read_failure(text: str) -> RowFailure:
    """Read the ``failure`` column's canonical JSON.

    Raises:
        IntegrityError: It is not a row failure, or not spelt canonically (``table_invalid``), or
            one that may pass, and so is never stored (``rows_inconsistent``).
    """
    try:
        failure = RowFailure.model_validate(parse_json(text))
        is_canonical = canonical_text(failure.model_dump()) == text
    except (InvalidInputError, ValueError) as error:
        raise IntegrityError(
            f"a row failure cannot be read: {type(error).__name__}", code="table_invalid"
        ) from error
    if not is_canonical:
        raise IntegrityError(
            "a row failure is the canonical JSON of an object, found one in another spelling; the "
            "dataset was written wrongly or edited, do not use it",
            code="table_invalid",
        )
    _, is_permanent, _ = ROW_FAILURE_CODES.get(failure.code, ("", True, ""))
    if not (failure.permanent and is_permanent):
        raise IntegrityError(
            f"a stored failure is permanent, found {failure.code!a}, which may pass; the dataset "
            f"was written wrongly or edited, do not use it",
            code="rows_inconsistent",
        )
    return failure


def _digest_column(digests: Sequence[str | None]) -> pa.Array:
    known = [digest for digest in digests if digest is not None]
    raw = pa.py_buffer(bytes.fromhex("".join(known)))
    column = pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), len(known), [None, raw])
    if len(known) == len(digests):
        return column
    rest = iter(column.to_pylist())
    return pa.array([None if one is None else next(rest) for one in digests], pa.binary(32))


def _token_column(rows: Sequence[NDArray[np.int32] | None]) -> pa.Array:
    present = [ids for ids in rows if ids is not None]
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([0 if ids is None else len(ids) for ids in rows], out=offsets[1:])
    values = np.concatenate([np.empty(0, np.int32), *present]).astype(np.int32, copy=False)
    column = ROWS_SCHEMA.field("token_ids").type
    missing = pa.array([ids is None for ids in rows]) if len(present) < len(rows) else None
    return pa.LargeListArray.from_arrays(
        pa.array(offsets), pa.array(values, pa.int32()), type=column, mask=missing
    )

"""The rows table of a shard, as bytes.

The encoder is deterministic. The decoder trusts nothing: a table must have exactly the schema
below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wllm_ray.dataset.format.arrow import read_batch
from wllm_ray.digest import canonical_json, parse_json, rows_digest
from wllm_ray.errors import IntegrityError, InvalidInputError
from wllm_ray.records import RowFailure

__all__ = [
    "OK",
    "ROWS_SCHEMA",
    "RowOutcome",
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


class RowOutcome(NamedTuple):
    """What became of one row: ``length`` feature rows from ``offset`` of its shard, or a failure.

    ``number`` counts all input rows. ``token_ids`` is [T] int32, or None where the row failed
    before it had any; ``token_sha256`` is their digest. A tuple, since there is one for each row.
    """

    number: int
    id: str
    metadata_json: str
    request_digest: str
    token_ids: NDArray[np.int32] | None
    token_sha256: str | None
    failure: RowFailure | None
    offset: int | None
    length: int

    @property
    def status(self) -> str:
        """``ok`` or the failure's code."""
        return self.failure.code if self.failure else OK


def encode_rows(outcomes: Sequence[RowOutcome]) -> memoryview:
    """The rows table of one shard as an Arrow IPC file with one record batch."""
    batch = pa.record_batch(
        [
            pa.array([row.number for row in outcomes], pa.int64()),
            pa.array([row.id for row in outcomes], pa.large_string()),
            pa.array([row.metadata_json for row in outcomes], pa.large_string()),
            pa.array([bytes.fromhex(row.request_digest) for row in outcomes], pa.binary(32)),
            _token_column([row.token_ids for row in outcomes]),
            pa.array([_raw(row.token_sha256) for row in outcomes], pa.binary(32)),
            pa.array([row.status for row in outcomes], pa.large_string()),
            pa.array([_failure_json(row.failure) for row in outcomes], pa.large_string()),
            pa.array([row.offset for row in outcomes], pa.int64()),
            pa.array([row.length for row in outcomes], pa.int64()),
        ],
        schema=ROWS_SCHEMA,
    )
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, ROWS_SCHEMA) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def rows_sha256(outcomes: Sequence[RowOutcome]) -> str:
    """The shard rows digest of FORMAT.md."""
    return rows_digest((row.request_digest, row.token_sha256, row.status) for row in outcomes)


def decode_rows(data: Any, name: str) -> pa.RecordBatch:
    """Read a rows table.

    Args:
        data: The file: bytes or a memory map.
        name: The file, for the message.

    Raises:
        IntegrityError: Not an Arrow file with one batch of exactly this schema
            (``table_invalid``), or one that is compressed.
    """
    batch = read_batch(data, ROWS_SCHEMA, name, code="table_invalid")
    if holes := _columns_with_holes(batch):
        raise IntegrityError(
            f"{name}: the columns {holes} hold nulls, which they must not", code="table_invalid"
        )
    return batch


def _columns_with_holes(batch: pa.RecordBatch) -> list[str]:
    """Arrow itself checks no value against ``nullable``."""
    found = [
        field.name for field in ROWS_SCHEMA if not field.nullable and batch[field.name].null_count
    ]
    return found + (["token_ids"] if batch["token_ids"].values.null_count else [])


def read_failure(text: str) -> RowFailure:
    """Read the ``failure`` column's canonical JSON.

    Raises:
        IntegrityError: It is not a row failure (``table_invalid``).
    """
    try:
        return RowFailure.model_validate(parse_json(text))
    except (InvalidInputError, ValueError) as error:
        raise IntegrityError(
            f"a row failure cannot be read: {type(error).__name__}", code="table_invalid"
        ) from error


def _raw(digest: str | None) -> bytes | None:
    return None if digest is None else bytes.fromhex(digest)


def _failure_json(failure: RowFailure | None) -> str | None:
    return None if failure is None else canonical_json(failure.model_dump()).decode()


def _token_column(rows: Sequence[NDArray[np.int32] | None]) -> pa.Array:
    lengths = [0 if ids is None else len(ids) for ids in rows]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    present = [np.asarray(ids, dtype=np.int32) for ids in rows if ids is not None]
    values = np.concatenate(present) if present else np.empty(0, np.int32)
    column = ROWS_SCHEMA.field("token_ids").type
    missing = pa.array([ids is None for ids in rows], pa.bool_())
    return pa.LargeListArray.from_arrays(
        pa.array(offsets), pa.array(values, pa.int32()), type=column, mask=missing
    )

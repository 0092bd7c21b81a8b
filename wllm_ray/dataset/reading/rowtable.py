"""What a rows table must say for its shard to be believed, and how rows are read from it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from wllm_ray.dataset.format.manifest import ShardEntry
from wllm_ray.dataset.format.rows import OK, decode_rows
from wllm_ray.errors import IntegrityError
from wllm_ray.positions import feature_rows_of

__all__ = ["good_rows", "read_rows", "token_arrays"]


def read_rows(data: Any, shard: ShardEntry, position: str) -> pa.RecordBatch:
    """Decode a shard's rows table and check ranges, order and counts against the manifest.

    Args:
        data: The file: bytes or a memory map.
        shard: What the manifest says of the shard.
        position: The dataset's position, which says how many feature rows a row has.

    Raises:
        IntegrityError: ``table_invalid`` or ``rows_inconsistent``.
    """
    name = shard.rows_file.name
    batch = decode_rows(data, name)
    lengths = batch.column("length").to_numpy()
    good = pc.equal(batch.column("status"), OK).to_numpy(zero_copy_only=False)
    offsets = np.where(good, np.cumsum(lengths) - lengths, -1)
    found = pc.fill_null(batch.column("offset"), -1).to_numpy(zero_copy_only=False)
    numbers = np.arange(shard.first_row, shard.first_row + batch.num_rows)
    facts = {
        "the number of rows": batch.num_rows == shard.rows,
        "the row numbers": np.array_equal(batch.column("row").to_numpy(), numbers),
        "the number of failures": int((~good).sum()) == shard.rows_failed,
        "the lengths": _in_range(lengths, good, shard.feature_rows),
        "the lengths that the position gives": _fits_position(batch, good, position),
        "the offsets": np.array_equal(found, offsets),
        "the number of feature rows": int(lengths.sum()) == shard.feature_rows,
        "the failures": np.array_equal(_valid(batch, "failure"), ~good),
        "the token ids of good rows": bool(_valid(batch, "token_ids")[good].all()),
        "the token digests": np.array_equal(
            _valid(batch, "token_ids"), _valid(batch, "token_sha256")
        ),
    }
    if wrong := [fact for fact, holds in facts.items() if not holds]:
        raise IntegrityError(
            f"{name}: {', '.join(wrong)} contradict the manifest or each other",
            code="rows_inconsistent",
        )
    return batch


def good_rows(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The rows that have features, in order."""
    return batch.filter(pc.equal(batch.column("status"), OK))


def token_arrays(batch: pa.RecordBatch) -> list[NDArray[np.int32] | None]:
    """Each row's token ids, [T] int32, as views of one buffer; None where a row has none."""
    column = batch.column("token_ids")
    values = column.values.to_numpy()
    offsets = column.offsets.to_numpy().tolist()
    present = column.is_valid().to_pylist()
    return [values[offsets[i] : offsets[i + 1]] if present[i] else None for i in range(len(column))]


def _in_range(lengths: NDArray[np.int64], good: NDArray[np.bool_], most: int) -> bool:
    """Whether just the good rows have any, and none more than there are: sums must not wrap."""
    return bool(((lengths > 0) == good).all() and (lengths >= 0).all() and (lengths <= most).all())


def _fits_position(batch: pa.RecordBatch, good: NDArray[np.bool_], position: str) -> bool:
    """Whether each good row has as many feature rows as its token ids and the position give."""
    tokens = pc.fill_null(pc.list_value_length(batch.column("token_ids")), 0).to_numpy()
    lengths = batch.column("length").to_numpy()
    pairs = set(zip(tokens[good].tolist(), lengths[good].tolist(), strict=True))
    return all(feature_rows_of(position, count) in (None, length) for count, length in pairs)


def _valid(batch: pa.RecordBatch, name: str) -> NDArray[np.bool_]:
    valid: NDArray[np.bool_] = batch.column(name).is_valid().to_numpy(zero_copy_only=False)
    return valid

"""What a writer may have got wrong, or a liar made to agree, in files that are whole.

A reader believes a file whose digest, schema, ranges and counts are right. What is proven here
takes a look at every row, which is what `verify` is for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from wllm_ray.dataset.format.build import build_manifest
from wllm_ray.dataset.format.dtypes import Dtype, narrow, widen
from wllm_ray.dataset.format.manifest import Manifest, Receipt, ShardEntry
from wllm_ray.dataset.format.rows import OK, read_failure
from wllm_ray.dataset.format.trace import features_of_traces, side_by_side
from wllm_ray.dataset.reading.files import DatasetFiles
from wllm_ray.dataset.reading.rowtable import good_rows
from wllm_ray.digest import canonical_json, parse_json
from wllm_ray.errors import IntegrityError, InvalidInputError
from wllm_ray.positions import feature_rows_of, resolve
from wllm_ray.records import RowFailure

__all__ = ["check_manifest", "check_rows", "check_traces", "check_vectors"]

# The line of a good row in the rows digest, and where its two digests stand.
_GOOD_LINE = np.frombuffer(b'["%64d","%64d","ok"]\n' % (0, 0), np.uint8)
_REQUEST, _TOKEN = slice(2, 66), slice(69, 133)
_SUSPECTS_AT_ONCE = 1024


def check_manifest(manifest: Manifest, receipts: dict[int, Receipt]) -> None:
    """Make the manifest once more of its receipts, and compare.

    Raises:
        IntegrityError: It says something else (``rows_inconsistent``).
    """
    if build_manifest(manifest.spec(), receipts) != manifest:
        raise IntegrityError(
            f"the manifest of {manifest.dataset_id!r} is not the one that its spec and receipts "
            f"give, so it was edited; restore the original",
            code="rows_inconsistent",
        )


def check_rows(batch: pa.RecordBatch, shard: ShardEntry, position: str) -> None:
    """Recompute what can be computed from each row, and compare it with what is recorded.

    Args:
        batch: The shard's rows table, from :func:`.rowtable.read_rows`.
        shard: What the manifest says of the shard.
        position: The dataset's.

    Raises:
        IntegrityError: ``digest_mismatch``: token ids, requests or rows have other digests than
            are recorded, or a failure another code. ``rows_inconsistent``: a good row lacks a
            token that the position names, or a failure that may pass is stored.
            ``table_invalid``: metadata or a failure cannot be read, or is not canonical.
    """
    name = shard.rows_file.name
    _check_digests(name, batch, shard)
    _check_failures(name, batch)
    _check_positions(name, batch, position)
    # Rows often share their metadata, and reading JSON is what takes longest.
    _check_metadata(name, batch.column("metadata").unique().to_pylist())


def check_vectors(name: str, stored: NDArray[Any], dtype: Dtype) -> None:
    """Look for vectors of zeros, which no writer stores: a row with one is failed.

    Args:
        name: The features file, for the message.
        stored: Its array, [feature rows, …, D] as stored.
        dtype: How.

    Raises:
        IntegrityError: There is one (``rows_inconsistent``).
    """
    vectors = stored.reshape(-1, stored.shape[-1])
    # One that does not begin with zero need not be read.
    suspects = np.flatnonzero(widen(np.ascontiguousarray(vectors[:, 0]), dtype) == 0)
    for start in range(0, len(suspects), _SUSPECTS_AT_ONCE):
        some = suspects[start : start + _SUSPECTS_AT_ONCE]
        is_zero = ~widen(vectors[some], dtype).any(axis=1)
        if is_zero.any():
            at = int(some[is_zero][0]) * len(stored) // len(vectors)
            raise IntegrityError(
                f"{name}: feature row {at} holds a vector that is zero throughout, and a row with "
                f"one is failed (all_zero); the dataset was written wrongly or edited, do not use "
                f"it",
                code="rows_inconsistent",
            )


def check_traces(files: DatasetFiles, shard: int, number: int) -> None:
    """Take one of a shard's arrays out of its traces once more, and compare it with what is stored.

    Args:
        files: The dataset's files.
        shard: Which shard.
        number: Which of the manifest's ``arrays``.

    Raises:
        IntegrityError: They differ (``rows_inconsistent``), or a file is damaged.
    """
    manifest, array = files.manifest, files.manifest.arrays[number]
    good = good_rows(files.rows(shard))
    traces = files.traces(shard, good)
    stored = files.array(shard, number)
    rows, offsets = good.column("row").to_pylist(), good.column("offset").to_pylist()
    for row, offset, trace in zip(rows, offsets, traces, strict=True):
        taken = features_of_traces(manifest, side_by_side(trace), [len(trace.token_ids)])
        values = narrow(np.ascontiguousarray(taken[:, array.columns]), manifest.dtype)
        there = stored[offset : offset + len(values)]
        if not np.array_equal(values.reshape(-1, *array.axes), there):
            name = manifest.shards[shard].features_files[number].name
            raise IntegrityError(
                f"{name}: the features of row {row} are not those that its trace gives; the "
                f"dataset was written wrongly or edited, do not use it",
                code="rows_inconsistent",
            )


def _check_digests(name: str, batch: pa.RecordBatch, shard: ShardEntry) -> None:
    recorded = _raw(batch.column("token_sha256"))
    there = batch.column("token_sha256").is_valid().to_numpy(zero_copy_only=False)
    tokens = _token_digests(batch.column("token_ids"))
    _expect(name, "token_sha256", recorded[there].tobytes(), tokens)
    requests = _raw(batch.column("request_sha256"))
    found = hashlib.sha256(requests.data).hexdigest()
    _expect(name, "requests_sha256", shard.requests_sha256, found)
    _expect(name, "rows_sha256", shard.rows_sha256, _rows_sha256(requests, recorded, there, batch))


def _raw(column: pa.FixedSizeBinaryArray) -> NDArray[np.uint8]:
    """[rows, 32] uint8: a column of digests; what it holds of a null means nothing."""
    values = np.frombuffer(column.buffers()[1], np.uint8)[32 * column.offset :]
    return values[: 32 * len(column)].reshape(-1, 32)


def _token_digests(column: pa.LargeListArray) -> bytes:
    """The token digests of FORMAT.md, of the rows that have token ids, one after the other."""
    values = column.values.to_numpy().astype("<i4", copy=False).view(np.uint8).data
    ends = (4 * column.offsets.to_numpy()).tolist()
    present = column.is_valid().to_pylist()
    return b"".join(
        hashlib.sha256(values[start:end]).digest()
        for start, end, there in zip(ends, ends[1:], present, strict=False)
        if there
    )


def _rows_sha256(
    requests: NDArray[np.uint8],
    tokens: NDArray[np.uint8],
    there: NDArray[np.bool_],
    batch: pa.RecordBatch,
) -> str:
    """The rows digest of FORMAT.md. Lines of good rows are all of one length, and made at once."""
    lines = np.tile(_GOOD_LINE, (len(requests), 1))
    lines[:, _REQUEST], lines[:, _TOKEN] = _hex(requests), _hex(tokens)
    total = hashlib.sha256()
    start = 0
    status = batch.column("status")
    for row in np.flatnonzero(pc.not_equal(status, OK)).tolist():
        total.update(lines[start:row].tobytes())
        token = tokens[row].tobytes().hex() if there[row] else None
        line = [requests[row].tobytes().hex(), token, status[row].as_py()]
        total.update(canonical_json(line) + b"\n")
        start = row + 1
    total.update(lines[start:].data)
    return total.hexdigest()


def _hex(digests: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[rows, 64] uint8: digests [rows, 32] as ASCII."""
    return np.frombuffer(digests.tobytes().hex().encode(), np.uint8).reshape(-1, 64)


def _check_failures(name: str, batch: pa.RecordBatch) -> None:
    failed = batch.filter(pc.not_equal(batch.column("status"), OK))
    # As with metadata: many rows fail in the same words, and reading them is what takes longest.
    failures = failed.column("failure").dictionary_encode()
    read = [_failure(name, text).code for text in failures.dictionary.to_pylist()]
    codes = pa.array(read, pa.large_string()).take(failures.indices)
    _expect(name, "failure codes", failed.column("status"), codes)


def _failure(name: str, text: str) -> RowFailure:
    try:
        return read_failure(text)
    except IntegrityError as error:
        raise IntegrityError(f"{name}: {error.message}", code=error.code) from error


def _check_positions(name: str, batch: pa.RecordBatch, position: str) -> None:
    """Whether each good row has all tokens that the position names."""
    if feature_rows_of(position, 1) is None:
        return  # generated tokens, which are not among the row's token ids
    good = np.flatnonzero(pc.equal(batch.column("status"), OK))
    tokens = pc.list_value_length(batch.column("token_ids")).fill_null(0).to_numpy()[good]
    for count in np.unique(tokens).tolist():
        if not _has_tokens(position, count):
            at = int(good[np.flatnonzero(tokens == count)[0]])
            raise IntegrityError(
                f"{name}: row {batch.column('row')[at]} has features, but its {count} token ids "
                f"lack one that position {position} names; the dataset was written wrongly or "
                f"edited, do not use it",
                code="rows_inconsistent",
            )


def _has_tokens(position: str, count: int) -> bool:
    try:
        return count > 0 and bool((resolve(position, count) < count).all())
    except InvalidInputError:
        return False


def _check_metadata(name: str, texts: Iterable[str]) -> None:
    for text in texts:
        try:
            value = parse_json(text)
            is_canonical = canonical_json(value) == text.encode()
        except InvalidInputError as error:
            raise _bad_metadata(name, error.message) from error
        if not isinstance(value, dict):
            raise _bad_metadata(name, type(value).__name__)
        if not is_canonical:
            raise _bad_metadata(name, "an object in another spelling")


def _bad_metadata(name: str, found: str) -> IntegrityError:
    return IntegrityError(
        f"{name}: metadata is the canonical JSON of an object, found {found}; the dataset was "
        f"written wrongly or edited, do not use it",
        code="table_invalid",
    )


def _expect(name: str, what: str, recorded: Any, computed: Any) -> None:
    if recorded != computed:
        raise IntegrityError(
            f"{name}: the recorded {what} and the one that its rows give differ; the dataset was "
            f"written wrongly or edited, do not use it",
            code="digest_mismatch",
        )

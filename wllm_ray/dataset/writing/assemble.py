"""Bring rows and captured chunks together: every row exactly once, in row order, or an error.

Pure: nothing is written here. A shard may be offered several times, with more chunks each time,
until no transient failure is left. Where a row occurs in several chunks, a captured result beats a
transient failure, and so does a permanent failure; two captured results for one row, or a captured
result beside a permanent failure, mean that something else is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.format.dtypes import numpy_dtype, resolve_dtype
from wllm_ray.dataset.format.manifest import DatasetSpec
from wllm_ray.dataset.format.rows import RowOutcome
from wllm_ray.dataset.writing.screen import Screen
from wllm_ray.digest import requests_digest, token_digest
from wllm_ray.errors import ConflictError, IntegrityError
from wllm_ray.positions import feature_rows_of
from wllm_ray.records import CapturedChunk, Fingerprint, RowFailure, RowRecord

__all__ = ["AssembledShard", "assemble_shard"]


@dataclass(frozen=True, slots=True)
class AssembledShard:
    """A shard that is ready to be written, unless ``transient`` holds anything.

    Attributes:
        outcomes: One per row, in row order.
        features: Blocks of [feature rows, sum of the sites' widths] in row order, as they are
            stored; as float32 they are views of the chunks' own arrays.
        feature_rows: Their total.
        chunks: For each good row, the number of the chunk that it was captured in.
        transient: Row index → why, for the rows to be tried again.
    """

    outcomes: tuple[RowOutcome, ...]
    features: tuple[NDArray[Any], ...]
    feature_rows: int
    chunks: tuple[int, ...]
    transient: dict[int, RowFailure]

    @property
    def good(self) -> list[RowOutcome]:
        """The rows that have features."""
        return [row for row in self.outcomes if row.failure is None]

    @property
    def rows_failed(self) -> int:
        """How many rows have no features."""
        return sum(row.failure is not None for row in self.outcomes)


class _Result(NamedTuple):
    """What one chunk says of one row: rows ``start`` to ``stop`` of its features, or a failure."""

    chunk: int
    start: int
    stop: int
    failure: RowFailure | None

    @property
    def rank(self) -> int:
        """Captured 2, permanent failure 1, transient failure 0."""
        return 2 if self.failure is None else int(self.failure.permanent)


def assemble_shard(
    spec: DatasetSpec, shard: int, rows: Sequence[RowRecord], chunks: Sequence[CapturedChunk]
) -> AssembledShard:
    """Combine the rows of one shard with what engines returned for them.

    Raises:
        IntegrityError: The rows are not those of the spec, a chunk does not fit them, a row is
            covered twice or not at all (``rows_inconsistent``), or an array has the wrong width
            or dtype (``array_invalid``).
        ConflictError: The chunks come from engines that may differ numerically, or run another
            model revision than the spec names (``mixed_fingerprints``).
    """
    _check_rows(spec, shard, rows)
    _check_fingerprints(spec, shard, chunks)
    for chunk in chunks:
        _check_array(spec, shard, chunk)
    results = _best_results(rows, chunks)
    screens = [Screen(spec, chunk) for chunk in chunks]
    outcomes: list[RowOutcome] = []
    spans: list[_Result] = []
    offset = 0
    for row in rows:
        result = _screened(results[row.index], screens)
        ids = _token_ids(row, chunks[result.chunk] if result.chunk >= 0 else None)
        outcomes.append(_outcome(spec, row, ids, result, offset))
        if result.failure is None:
            spans.append(result)
            offset += result.stop - result.start
    transient = {
        row.number: row.failure for row in outcomes if row.failure and not row.failure.permanent
    }
    return AssembledShard(
        outcomes=tuple(outcomes),
        features=tuple(_blocks(spans, screens)),
        feature_rows=offset,
        chunks=tuple(span.chunk for span in spans),
        transient=transient,
    )


def _check_rows(spec: DatasetSpec, shard: int, rows: Sequence[RowRecord]) -> None:
    if not 0 <= shard < len(spec.shards):
        _fail(f"shard {shard} does not exist: the spec has {len(spec.shards)}, from 0")
    asked = spec.shards[shard]
    expected = range(asked.first_row, asked.first_row + asked.rows)
    if [row.index for row in rows] != list(expected):
        _fail(
            f"shard {shard}: expected rows {expected.start} to {expected.stop - 1}, each once and "
            f"in order, found {len(rows)} rows"
        )
    found = requests_digest(row.request_digest for row in rows)
    if found != asked.requests_sha256:
        _fail(
            f"shard {shard}: the rows have request digest {found}, the spec says "
            f"{asked.requests_sha256}; the input is not the one that the dataset was begun with"
        )


def _check_fingerprints(spec: DatasetSpec, shard: int, chunks: Sequence[CapturedChunk]) -> None:
    wanted = (spec.model.revision, spec.tokenizer.revision, spec.dtype)
    first: Fingerprint | None = None
    for chunk in chunks:
        found = chunk.description.fingerprint
        first = first or found
        fields = [n for n in Fingerprint.model_fields if getattr(found, n) != getattr(first, n)]
        dtype = resolve_dtype(spec.storage_dtype, found.engine_dtype, spec.position)
        if fields or (found.model_revision, found.tokenizer_revision, dtype) != wanted:
            differ = ", ".join(fields) or "model or tokenizer revision or dtype from the spec's"
            raise ConflictError(
                f"shard {shard} would mix engines that may differ numerically ({differ}); give "
                f"all replicas the same model, versions, dtype and device and run again",
                code="mixed_fingerprints",
                stage="stage_shard",
                details={"shard": shard, "fields": fields},
            )


def _check_array(spec: DatasetSpec, shard: int, chunk: CapturedChunk) -> None:
    total = int(chunk.lengths.sum())
    expected = (total, sum(spec.site_widths))
    features = chunk.features
    is_float32 = features.dtype == numpy_dtype("float32")
    if chunk.widths != spec.site_widths or features.shape != expected or not is_float32:
        raise IntegrityError(
            f"shard {shard}: expected captured features of shape {expected} and dtype float32 with "
            f"site widths {spec.site_widths}, found {features.shape} and {features.dtype} with "
            f"{chunk.widths}",
            code="array_invalid",
            stage="stage_shard",
        )
    if chunk.row_index.shape != chunk.lengths.shape or (chunk.lengths < 0).any():
        _fail(f"shard {shard}: a chunk's row_index and lengths do not belong together")
    if unknown := set(chunk.failures) - set(chunk.row_index.tolist()):
        _fail(f"a chunk reports failures of rows {sorted(unknown)[:5]}, which it does not hold")


def _best_results(rows: Sequence[RowRecord], chunks: Sequence[CapturedChunk]) -> dict[int, _Result]:
    """Row index → the result that counts; proves that every row has one."""
    best: dict[int, _Result | None] = dict.fromkeys(row.index for row in rows)
    decided = {row.index for row in rows if row.failure is not None}
    for row in rows:
        if row.failure is not None:
            best[row.index] = _Result(-1, 0, 0, row.failure)
    for number, chunk in enumerate(chunks):
        for index, result in _results_of(number, chunk):
            if index not in best or index in decided:
                why = "failed before it was sent" if index in decided else "is not in this shard"
                _fail(f"a chunk holds row {index}, which {why}")
            best[index] = _better(index, best[index], result)
    complete = {index: result for index, result in best.items() if result is not None}
    if missing := [index for index, result in best.items() if result is None]:
        _fail(f"rows {missing[:5]} ({len(missing)} in all) were neither captured nor failed")
    return complete


def _results_of(number: int, chunk: CapturedChunk) -> Iterator[tuple[int, _Result]]:
    stops = np.cumsum(chunk.lengths).tolist()
    lengths = chunk.lengths.tolist()
    for index, length, stop in zip(chunk.row_index.tolist(), lengths, stops, strict=True):
        failure = chunk.failures.get(index)
        if (failure is None) != (length > 0):
            said = "has no failure" if failure is None else "failed"
            _fail(f"row {index} {said}, but a chunk holds {length} feature rows of it")
        yield index, _Result(number, stop - length, stop, failure)


def _better(index: int, old: _Result | None, new: _Result) -> _Result:
    if old is None:
        return new
    if min(old.rank, new.rank) > 0 and max(old.rank, new.rank) == 2:  # noqa: PLR2004 (a rank)
        both = "captured twice" if old.rank == new.rank else "captured and failed for good"
        _fail(f"row {index} was {both}; each row has one result")
    return old if old.rank > new.rank or old.rank == new.rank == 1 else new


def _screened(result: _Result, screens: Sequence[Screen]) -> _Result:
    """Turn a captured result that must not be stored into a permanent failure."""
    if result.failure is not None:
        return result
    failure = screens[result.chunk].failure(result.start, result.stop)
    return result._replace(failure=failure) if failure else result


def _token_ids(row: RowRecord, chunk: CapturedChunk | None) -> NDArray[np.int32] | None:
    theirs = chunk.token_ids.get(row.index) if chunk else None
    if row.token_ids is None:
        return theirs
    if theirs is not None and not np.array_equal(theirs, row.token_ids):
        _fail(f"row {row.index}: the engine ran other token ids than were sent")
    return row.token_ids


def _outcome(
    spec: DatasetSpec, row: RowRecord, ids: NDArray[np.int32] | None, result: _Result, offset: int
) -> RowOutcome:
    length = 0 if result.failure else result.stop - result.start
    if result.failure is None:
        if ids is None:
            _fail(f"row {row.index} was captured, but nobody recorded its token ids")
        elif feature_rows_of(spec.position, len(ids)) not in (None, length):
            _fail(
                f"row {row.index}: position {spec.position} of {len(ids)} tokens cannot give "
                f"{length} feature rows"
            )
    return RowOutcome(
        number=row.index,
        id=row.id,
        metadata_json=row.metadata_json,
        request_digest=row.request_digest,
        token_ids=ids,
        token_sha256=None if ids is None else token_digest(ids),
        failure=result.failure,
        offset=None if result.failure else offset,
        length=length,
    )


def _blocks(spans: Sequence[_Result], screens: Sequence[Screen]) -> Iterator[NDArray[Any]]:
    """Views of the chunks' arrays as stored, neighbouring rows of one chunk joined."""
    at = 0
    while at < len(spans):
        first = last = spans[at]
        at += 1
        while at < len(spans) and (spans[at].chunk, spans[at].start) == (last.chunk, last.stop):
            last = spans[at]
            at += 1
        yield np.ascontiguousarray(screens[first.chunk].stored[first.start : last.stop])


def _fail(message: str) -> Any:
    raise IntegrityError(message, code="rows_inconsistent", stage="stage_shard")

"""Bring rows and captured chunks together: every row exactly once, in row order, or an error.

Pure: nothing is written here. A shard may be offered several times, with more chunks each time,
until no transient failure is left.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.format.dtypes import numpy_dtype, resolve_dtype
from wllm_ray.dataset.format.manifest import DatasetSpec
from wllm_ray.dataset.format.rows import RowColumns
from wllm_ray.dataset.writing.results import Results, best_results, inconsistent
from wllm_ray.dataset.writing.screen import Screen
from wllm_ray.digest import requests_digest
from wllm_ray.errors import ConflictError, IntegrityError
from wllm_ray.positions import feature_rows_of
from wllm_ray.records import CapturedChunk, Fingerprint, RowFailure, RowRecord

__all__ = ["AssembledShard", "assemble_shard"]

TokenIds = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AssembledShard:
    """A shard that is ready to be written, unless ``transient`` holds anything.

    Attributes:
        rows: What became of each row.
        features: Blocks of [feature rows, sum of the sites' widths] in row order, as they are
            stored; as float32 they are views of the chunks' own arrays.
        chunks: For each good row, the number of the chunk that it was captured in.
    """

    rows: RowColumns
    features: tuple[NDArray[Any], ...]
    chunks: tuple[int, ...]

    @property
    def feature_rows(self) -> int:
        """How many there are in all."""
        return int(self.rows.lengths.sum())

    @property
    def transient(self) -> dict[int, RowFailure]:
        """Row index → why, for the rows to be tried again."""
        failures = sorted(self.rows.failures.items())
        return {self.rows.first_row + n: why for n, why in failures if not why.permanent}


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
    results = best_results(rows, chunks)
    token_ids = _token_ids(rows, chunks, results)
    screens = [Screen(spec, chunk) for chunk in chunks]
    failures = results.failures | _unfit(results, screens)
    lengths = results.stops - results.starts
    lengths[list(failures)] = 0
    columns = RowColumns(
        first_row=rows[0].index,
        ids=[row.id for row in rows],
        metadata=[row.metadata_json for row in rows],
        request_digests=[row.request_digest for row in rows],
        token_ids=token_ids,
        failures=failures,
        lengths=lengths,
    )
    good = np.flatnonzero(columns.is_good)
    _check_lengths(spec, columns, good)
    blocks = tuple(_blocks(results, good, screens))
    return AssembledShard(columns, blocks, tuple(results.chunks[good].tolist()))


def _check_rows(spec: DatasetSpec, shard: int, rows: Sequence[RowRecord]) -> None:
    if not 0 <= shard < len(spec.shards):
        inconsistent(f"shard {shard} does not exist: the spec has {len(spec.shards)}, from 0")
    asked = spec.shards[shard]
    expected = range(asked.first_row, asked.first_row + asked.rows)
    if [row.index for row in rows] != list(expected):
        inconsistent(
            f"shard {shard}: expected rows {expected.start} to {expected.stop - 1}, each once and "
            f"in order, found {len(rows)} rows"
        )
    found = requests_digest(row.request_digest for row in rows)
    if found != asked.requests_sha256:
        inconsistent(
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
        inconsistent(f"shard {shard}: a chunk's row_index and lengths do not belong together")
    if unknown := set(chunk.failures) - set(chunk.row_index.tolist()):
        listed = sorted(unknown)[:5]
        inconsistent(f"a chunk reports failures of rows {listed}, which it does not hold")


def _unfit(results: Results, screens: Sequence[Screen]) -> dict[int, RowFailure]:
    """Place → why, for captured rows that must not be stored."""
    unfit = {}
    for number, screen in enumerate(screens):
        if screen.is_fine:
            continue
        for place in np.flatnonzero(results.chunks == number).tolist():
            start, stop = int(results.starts[place]), int(results.stops[place])
            failure = None if place in results.failures else screen.failure(start, stop)
            if failure:
                unfit[place] = failure
    return unfit


def _token_ids(
    rows: Sequence[RowRecord], chunks: Sequence[CapturedChunk], results: Results
) -> list[TokenIds | None]:
    """The ids that were sent, or those that an engine says it ran where it was sent text."""
    sent = [row.token_ids for row in rows]
    if not any(chunk.token_ids for chunk in chunks):
        return sent
    each = zip(rows, sent, results.chunks.tolist(), strict=True)
    return [
        _agreed(row, ids, chunks[number].token_ids.get(row.index)) if number >= 0 else ids
        for row, ids, number in each
    ]


def _agreed(row: RowRecord, sent: TokenIds | None, ran: TokenIds | None) -> TokenIds | None:
    if sent is None or ran is None:
        return ran if sent is None else sent
    if not np.array_equal(ran, sent):
        inconsistent(f"row {row.index}: the engine ran other token ids than were sent")
    return sent


def _check_lengths(spec: DatasetSpec, rows: RowColumns, good: NDArray[np.int64]) -> None:
    """Every row that was captured has ids, and as many feature rows as the position gives them."""
    tokens = np.array([-1 if ids is None else len(ids) for ids in rows.token_ids], np.int64)[good]
    if (tokens < 0).any():
        index = rows.first_row + int(good[tokens < 0][0])
        inconsistent(f"row {index} was captured, but nobody recorded its token ids")
    counts, which = np.unique(tokens, return_inverse=True)
    possible = [feature_rows_of(spec.position, count) for count in counts.tolist()]
    wanted = np.array([-1 if count is None else count for count in possible], np.int64)[which]
    wrong = (wanted >= 0) & (wanted != rows.lengths[good])
    if wrong.any():
        place = int(good[wrong][0])
        inconsistent(
            f"row {rows.first_row + place}: position {spec.position} of {tokens[wrong][0]} tokens "
            f"cannot give {rows.lengths[place]} feature rows"
        )


def _blocks(
    results: Results, good: NDArray[np.int64], screens: Sequence[Screen]
) -> Iterator[NDArray[Any]]:
    """Views of the chunks' arrays as stored, neighbouring rows of one chunk joined."""
    if not good.size:
        return
    chunks, starts, stops = (a[good] for a in (results.chunks, results.starts, results.stops))
    is_next = (chunks[1:] == chunks[:-1]) & (starts[1:] == stops[:-1])
    lasts = np.append(np.flatnonzero(~is_next), good.size - 1)
    firsts = np.append(0, lasts[:-1] + 1)
    each = (chunks[firsts].tolist(), starts[firsts].tolist(), stops[lasts].tolist())
    for number, start, stop in zip(*each, strict=True):
        yield np.ascontiguousarray(screens[number].stored[start:stop])

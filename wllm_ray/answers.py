"""Building answers: row results and features from what was captured or committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.format.manifest import Manifest
from wllm_ray.digest import token_digest
from wllm_ray.errors import CaptureError, RowsFailedError, TooLargeError
from wllm_ray.records import CapturedChunk, RowFailure, RowRecord
from wllm_ray.requests import Prepared
from wllm_ray.schema import ActivationResponse, DatasetReference, RowResult
from wllm_ray.wire import Inline

__all__ = [
    "dataset_answer",
    "dataset_reference",
    "expect_fits_inline",
    "inline_answer",
    "rows_failed",
]

AXES = ("row", "site", "hidden")
# A message that lists more would not be read; the count says how many there are.
MAX_LISTED_FAILURES = 50
FLOAT32_BYTES = 4


def expect_fits_inline(prepared: Prepared, max_bytes: int) -> None:
    """Refuse, before anything is run, an answer that would be too large.

    Raises:
        TooLargeError: Its features take more than ``max_bytes``; the message says how much fits.
    """
    row_bytes = sum(prepared.selection.site_widths) * FLOAT32_BYTES
    feature_rows = sum(prepared.selection.feature_rows(row) for row in prepared.rows)
    total = row_bytes * feature_rows
    if total > max_bytes:
        raise TooLargeError(
            f"the inline result would be {total} bytes, {feature_rows} feature rows of "
            f"{row_bytes}, and the bound is {max_bytes}, {max_bytes // row_bytes} feature rows; "
            f"send fewer rows a request, fewer sites, or persistence `dataset`",
            stage="plan_chunks",
            details={"bytes": total, "max_inline_bytes": max_bytes},
        )


def dataset_reference(manifest: Manifest, superseded: int = 0) -> DatasetReference:
    """What stands for a committed dataset in an answer.

    Args:
        manifest: The dataset.
        superseded: How many shards of this run's another attempt had written first, otherwise.
    """
    return DatasetReference(
        dataset_id=manifest.dataset_id,
        manifest_sha256=manifest.manifest_sha256,
        content_sha256=manifest.content_sha256,
        rows=manifest.rows,
        rows_failed=manifest.rows_failed,
        shards=len(manifest.shards),
        shards_superseded=superseded,
    )


def rows_failed(rows: Sequence[RowRecord], transient: Mapping[int, RowFailure]) -> RowsFailedError:
    """The error for transient failures that are left when a job ends."""
    ids = {row.index: row.id for row in rows if row.index in transient}
    listed = [
        {"id": ids[index], "index": index, **failure.model_dump()}
        for index, failure in sorted(transient.items())[:MAX_LISTED_FAILURES]
    ]
    return RowsFailedError(
        f"{len(transient)} of {len(rows)} rows failed for reasons that may pass "
        f"(first: row {listed[0]['index']}, {listed[0]['code']}); finished shards are kept, send "
        "the same request again to finish the rest",
        stage="capture",
        details={"failures": listed, "count": len(transient)},
    )


def _row_result(row: RowRecord, offset: int, length: int, failure: RowFailure | None) -> RowResult:
    ids = None if row.token_ids is None else row.token_ids.tolist()
    return RowResult(
        id=row.id,
        index=row.index,
        offset=None if failure else offset,
        length=0 if failure else length,
        request_sha256=row.request_digest,
        token_ids=ids,
        token_sha256=None if row.token_ids is None else token_digest(row.token_ids),
        failure=failure,
    )


def _row_results(
    prepared: Prepared, lengths: Mapping[int, int], failures: Mapping[int, RowFailure]
) -> list[RowResult]:
    """One result per row in request order; every row is whole or has failed."""
    results = []
    offset = 0
    for row in prepared.rows:
        failure = row.failure or failures.get(row.index)
        length = lengths.get(row.index, 0)
        wanted = 0 if failure else prepared.selection.feature_rows(row)
        if length != wanted:
            raise CaptureError(
                f"row {row.index} came back with {length} feature rows and failure "
                f"{failure.code if failure else None}; expected {wanted} feature rows",
                stage="capture",
            )
        results.append(_row_result(row, offset, length, failure))
        offset += results[-1].length
    return results


def inline_answer(
    prepared: Prepared, chunks: Sequence[CapturedChunk], transient: Mapping[int, RowFailure]
) -> Inline:
    """The answer with its features, from chunks in row order.

    Args:
        prepared: The request.
        chunks: What was captured.
        transient: Row index → failure, for rows that no replica could finish.
    """
    failures = dict(transient)
    lengths: dict[int, int] = {}
    for chunk in chunks:
        failures |= chunk.failures
        pairs = zip(chunk.row_index.tolist(), chunk.lengths.tolist(), strict=True)
        lengths |= {index: length for index, length in pairs if length}
    features = _concatenate(prepared, chunks)
    answered_by = chunks[0].description if chunks else prepared.description
    response = _response(prepared, _row_results(prepared, lengths, failures)).model_copy(
        update={
            "shape": _shape(len(features), prepared.selection.site_widths),
            "fingerprint": answered_by.fingerprint,
            "versions": answered_by.versions,
            "selftest": answered_by.selftest,
        }
    )
    return Inline(response, features)


def _concatenate(prepared: Prepared, chunks: Sequence[CapturedChunk]) -> NDArray[np.float32]:
    prints = {chunk.description.fingerprint.digest for chunk in chunks}
    if len(prints) > 1:
        raise CaptureError(
            f"chunks of one request came from {len(prints)} engines that may differ numerically; "
            "wait until all replicas run the same version, then send it again",
            stage="capture",
        )
    widths = prepared.selection.site_widths
    for chunk in chunks:
        if chunk.widths != widths:
            raise CaptureError(
                f"expected sites of widths {widths}, found {chunk.widths} in a chunk of "
                f"{len(chunk.row_index)} rows; the replica and the ingress run different versions",
                stage="capture",
            )
    empty = np.empty((0, sum(widths)), np.float32)
    return np.concatenate([chunk.features for chunk in chunks]) if chunks else empty


def _shape(feature_rows: int, widths: Sequence[int]) -> tuple[int, int, int | None]:
    """(feature rows, sites, width), the width None where the sites differ in it."""
    return feature_rows, len(widths), widths[0] if len(set(widths)) == 1 else None


def dataset_answer(
    prepared: Prepared,
    manifest: Manifest,
    failures: Mapping[int, RowFailure],
    superseded: int = 0,
) -> ActivationResponse:
    """The answer that refers to a committed dataset.

    Args:
        prepared: The request.
        manifest: The committed manifest.
        failures: Row index → failure, as the dataset records them.
        superseded: As of :func:`dataset_reference`.
    """
    good = (row for row in prepared.rows if row.index not in failures)
    lengths = {row.index: prepared.selection.feature_rows(row) for row in good}
    results = _row_results(prepared, lengths, failures)
    return _response(prepared, results).model_copy(
        update={
            "shape": manifest.shape,
            "dtype": manifest.dtype,
            "dataset": dataset_reference(manifest, superseded),
            "fingerprint": manifest.fingerprint,
            "versions": manifest.versions,
            "selftest": manifest.selftest,
        }
    )


def _response(prepared: Prepared, rows: list[RowResult]) -> ActivationResponse:
    description, selection = prepared.description, prepared.selection
    return ActivationResponse(
        model=description.model,
        tokenizer=description.tokenizer,
        axes=AXES,
        sites=selection.identity.sites,
        site_widths=selection.site_widths,
        position=selection.position,
        capture_mode=prepared.request.capture_mode,
        shape=_shape(0, selection.site_widths),
        dtype="float32",
        rows=rows,
        features=None,
        dataset=None,
        fingerprint=description.fingerprint,
        versions=description.versions,
        selftest=description.selftest,
        timings=prepared.timings,
    )

"""Write a dataset: spec first, then shards with their receipts, then the manifest. Each once.

Nothing here locks. Every record that decides something is written create-only, so the first
writer wins, a retry is settled by reading back, and whatever dies in between leaves either a whole
dataset or none.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from wllm_ray.dataset.format.build import build_manifest
from wllm_ray.dataset.format.documents import read_receipt
from wllm_ray.dataset.format.layout import (
    folder,
    manifest_key,
    receipt_key,
    spec_key,
)
from wllm_ray.dataset.format.manifest import (
    DatasetSpec,
    Manifest,
    Receipt,
    document_bytes,
)
from wllm_ray.dataset.format.trace import taken_from_traces
from wllm_ray.dataset.reading.decided import expect_not_abandoned, get_document
from wllm_ray.dataset.reading.staged import (
    check_file,
    committed_receipts,
    expect_committed_spec,
    expect_listed,
    expect_not_lost,
    load_spec,
    read_receipts,
    staged_shards,
    standing_manifest,
)
from wllm_ray.dataset.stores.store import Store
from wllm_ray.dataset.writing.assemble import assemble_shard
from wllm_ray.dataset.writing.conflict import RowsOf, conflict
from wllm_ray.dataset.writing.shard_files import write_files
from wllm_ray.errors import (
    AlreadyExistsError,
    ConflictError,
    RowsFailedError,
)
from wllm_ray.records import CapturedChunk, Fingerprint, RowFailure, RowRecord

__all__ = [
    "StageResult",
    "commit_manifest",
    "create_spec",
    "load_spec",
    "measured",
    "put_receipt",
    "stage_shard",
    "staged_shards",
]

_LISTED = 20


@dataclass(frozen=True, slots=True)
class StageResult:
    """What came of staging one shard.

    Attributes:
        receipt: The receipt that stands, or None where transient failures are left.
        transient: Row index → why; nothing was written if there is any.
        created: This call wrote the receipt.
        superseded: Another attempt's receipt with other bytes stands; this one's work is void.
    """

    receipt: Receipt | None
    transient: dict[int, RowFailure] = field(default_factory=dict)
    created: bool = False
    superseded: bool = False


def create_spec(store: Store, spec: DatasetSpec, *, rows_of: RowsOf | None = None) -> bool:
    """Write down what is asked, once, before anything is captured.

    Args:
        store: The storage root.
        spec: What is asked.
        rows_of: Shard number → the rows of that shard in this request. With it, a conflict names
            the ids of the rows that differ, where the shard in question is staged.

    Returns:
        True if this call created it; False if the same spec was there, as on a resume.

    Raises:
        ConflictError: The id stands for something else (``dataset_conflict``, or
            ``dataset_immutable`` where it is committed). Details name the fields that differ, or
            else the shards and rows. Or the dataset was given up (``dataset_abandoned``).
        IntegrityError: The id is committed, but its spec is missing or another one.
        StorageError: The root refused the write.
    """
    key = spec_key(spec.dataset_id)
    expect_not_abandoned(store, spec.dataset_id)
    expect_not_lost(store, key, spec.dataset_id)
    try:
        return _create(store, key, document_bytes(spec))
    except AlreadyExistsError:
        existing = load_spec(store, spec.dataset_id)
    if manifest := standing_manifest(store, spec.dataset_id):
        expect_committed_spec(store, existing, manifest)
    raise conflict(store, existing, spec, rows_of)


def stage_shard(
    store: Store,
    spec: DatasetSpec,
    shard: int,
    rows: Sequence[RowRecord],
    chunks: Sequence[CapturedChunk],
) -> StageResult:
    """Write one shard's files and, last, its receipt.

    Idempotent: the first receipt stands, and one that measured the same is a success.

    Args:
        store: The storage root.
        spec: What was asked, as created.
        shard: Which shard.
        rows: All rows of the shard, in order.
        chunks: What engines returned for them, in any order; a later attempt on some rows is one
            more chunk. Where the spec wants traces, they are of those sites at every token.

    Returns:
        The receipt, or the transient failures that are left; then nothing was written.

    Raises:
        IntegrityError: Rows and chunks do not make up the shard (``rows_inconsistent``,
            ``array_invalid``), or the dataset is committed and has lost the shard's receipt.
        ConflictError: The chunks come from different engines (``mixed_fingerprints``), or the
            dataset was given up (``dataset_abandoned``).
        StorageError: The root refused a write.
    """
    began = time.perf_counter()
    asked = [taken_from_traces(spec, chunk) for chunk in chunks] if spec.trace else chunks
    assembled = assemble_shard(spec, shard, rows, asked)
    if assembled.transient:
        return StageResult(receipt=None, transient=assembled.transient)
    expect_not_lost(store, receipt_key(spec.dataset_id, shard), spec.dataset_id)
    files, digest = write_files(store, spec, shard, assembled, chunks)
    receipt = Receipt(
        spec_sha256=spec.sha256,
        shard=shard,
        first_row=spec.shards[shard].first_row,
        rows=len(rows),
        rows_failed=len(assembled.rows.failures),
        feature_rows=assembled.feature_rows,
        files=files,
        rows_sha256=digest,
        recaptured=sum(chunk.recaptured for chunk in chunks),
        fingerprint=chunks[0].description.fingerprint if chunks else None,
        versions=dict(chunks[0].description.versions) if chunks else {},
        selftest=chunks[0].description.selftest if chunks else None,
        timings=_timings(chunks, time.perf_counter() - began),
    )
    return put_receipt(store, spec, receipt)


def commit_manifest(store: Store, dataset_id: str) -> Manifest:
    """Create the manifest, and with it the dataset.

    Idempotent: a second committer finds a manifest that was made from the same receipts, and
    returns it.

    Raises:
        RowsFailedError: A shard has no receipt yet (``rows_failed``); details list them.
        ConflictError: Shards come from different engines, which the spec does not allow
            (``mixed_fingerprints``); or the dataset was given up (``dataset_abandoned``).
        NotFoundError: No dataset with this id was begun (``dataset_not_found``).
        IntegrityError: A receipt or a file is damaged, or the manifest that stands was not made
            from these receipts.
    """
    spec = load_spec(store, dataset_id)
    standing = standing_manifest(store, dataset_id)
    sizes = dict(store.list(folder(dataset_id)))
    if standing is None:
        expect_not_abandoned(store, dataset_id)
        receipts = read_receipts(store, spec, sizes)
        _expect_all(spec, receipts)
        if not spec.mixed_fingerprints:
            _expect_one_fingerprint(receipts)
    else:
        receipts = committed_receipts(store, spec, standing)
    for receipt in receipts.values():
        for entry in receipt.files:
            listed = sizes.get(f"{folder(dataset_id)}/{entry.name}")
            expect_listed(store, dataset_id, entry, listed)
    return standing or _create_manifest(store, spec, receipts)


def put_receipt(store: Store, spec: DatasetSpec, receipt: Receipt) -> StageResult:
    """Create the receipt of a shard whose files are written; the first one stands.

    Raises:
        IntegrityError: Another receipt stands, and a file that it names is damaged.
        StorageError: The root refused the write.
    """
    key = receipt_key(spec.dataset_id, receipt.shard)
    try:
        return StageResult(receipt, created=_create(store, key, document_bytes(receipt)))
    except AlreadyExistsError:
        standing = read_receipt(get_document(store, key), spec, receipt.shard)
    for entry in standing.files:
        check_file(store, spec.dataset_id, entry)
    return StageResult(standing, superseded=measured(standing) != measured(receipt))


def _create(store: Store, key: str, document: bytes) -> bool:
    """Write a document, create-only, as :meth:`.Store.put`.

    A root that ignores the condition may have one writer, and that one is safe by looking first.
    """
    if store.size(key) is not None and get_document(store, key) != document:
        raise AlreadyExistsError(
            f"{key} exists already under {store.uri} with other bytes; it was left as it is"
        )
    return store.put(key, document)


def measured(receipt: Receipt) -> tuple[Any, ...]:
    """What of a receipt enters the content digest; timings and the table's own bytes do not."""
    features = [entry.sha256 for entry in receipt.features_files]
    return receipt.rows_sha256, features, receipt.fingerprint


def _timings(chunks: Sequence[CapturedChunk], stage_seconds: float) -> dict[str, float]:
    total: Counter[str] = Counter()
    for chunk in chunks:
        total.update(chunk.timings)
    return {name: float(seconds) for name, seconds in total.items()} | {"stage": stage_seconds}


def _expect_all(spec: DatasetSpec, receipts: dict[int, Receipt]) -> None:
    missing = [number for number in range(len(spec.shards)) if number not in receipts]
    if missing:
        listed = ", ".join(map(str, missing[:_LISTED]))
        raise RowsFailedError(
            f"{len(missing)} of {len(spec.shards)} shards have no receipt yet ({listed}), so "
            f"nothing was committed; run the same job again, it resumes",
            details={"missing_shards": missing},
        )


def _expect_one_fingerprint(receipts: dict[int, Receipt]) -> None:
    first: Fingerprint | None = None
    for number, receipt in receipts.items():
        found = receipt.fingerprint
        first = first or found
        if found is None or first is None or found == first:
            continue
        fields = [n for n in Fingerprint.model_fields if getattr(found, n) != getattr(first, n)]
        raise ConflictError(
            f"shard {number} comes from an engine that may differ numerically from that of the "
            f"shards before it ({', '.join(fields)}), so nothing was committed; use another "
            f"dataset id (with mixed_fingerprints if unlike engines are what you want), or remove "
            f"the receipts of one kind and run again",
            code="mixed_fingerprints",
            stage="commit_manifest",
            details={"shard": number, "fields": fields},
        )


def _create_manifest(store: Store, spec: DatasetSpec, receipts: dict[int, Receipt]) -> Manifest:
    """Create the manifest; one that another committer made meanwhile must be of these receipts."""
    ours = build_manifest(spec, receipts)
    try:
        _create(store, manifest_key(spec.dataset_id), document_bytes(ours))
    except AlreadyExistsError:
        if standing := standing_manifest(store, spec.dataset_id):
            committed_receipts(store, spec, standing)
            return standing
        expect_not_abandoned(store, spec.dataset_id)
        raise
    return ours

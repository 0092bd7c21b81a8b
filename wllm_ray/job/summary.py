"""What came of a job, and what it leaves beside its dataset.

``runs/<id>/summary.json`` and ``runs/<id>/failures.json``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from wllm_ray.dataset.format.layout import folder
from wllm_ray.dataset.format.manifest import Receipt
from wllm_ray.dataset.format.rows import ROWS_SCHEMA, decode_rows, read_failure
from wllm_ray.dataset.stores.store import Store
from wllm_ray.digest import canonical_json
from wllm_ray.errors import NotFoundError
from wllm_ray.job.run import JobOutcome
from wllm_ray.job.source import RowSource
from wllm_ray.records import RowFailure

__all__ = ["failures_of", "permanent_failures", "summary_of", "write_run_files"]

RUNS = "runs"


def permanent_failures(
    store: Store, dataset_id: str, receipts: Mapping[int, Receipt]
) -> Iterator[tuple[int, str, RowFailure]]:
    """(row index, id, failure) of every failed row of the shards that are written."""
    for _, receipt in sorted(receipts.items()):
        if receipt.rows_failed:
            name = receipt.rows_file.name
            table = decode_rows(store.get(f"{folder(dataset_id)}/{name}"), name)
            columns = (
                table.column(ROWS_SCHEMA.get_field_index(one)).to_pylist()
                for one in ("row", "id", "failure")
            )
            for index, row_id, text in zip(*columns, strict=True):
                if text is not None:
                    yield index, row_id, read_failure(text)


def failures_of(store: Store, outcome: JobOutcome, rows: RowSource) -> Iterator[dict[str, Any]]:
    """Every failed row as JSON: those for good, then those that may pass."""
    for index, row_id, failure in permanent_failures(
        store, outcome.spec.dataset_id, outcome.receipts
    ):
        yield {"index": index, "id": row_id, **failure.model_dump()}
    if outcome.transient:
        for index, row in enumerate(rows()):
            if index in outcome.transient:
                failure = outcome.transient[index]
                yield {"index": index, "id": row.id, **failure.model_dump()}


def summary_of(
    store: Store, outcome: JobOutcome, failures: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The outcome for programs; the same for every run that finds the same state."""
    spec, manifest = outcome.spec, outcome.manifest
    permanent = sum(one["permanent"] for one in failures)
    staged = sum(receipt.rows for receipt in outcome.receipts.values())
    return {
        "status": "committed" if manifest else "incomplete",
        "dataset_id": spec.dataset_id,
        "root": store.uri,
        "rows": spec.rows,
        "rows_ok": staged - permanent,
        "rows_failed": permanent,
        "rows_to_retry": len(outcome.transient),
        "shards": len(spec.shards),
        "shards_staged": len(outcome.receipts),
        "failures_by_code": dict(sorted(Counter(one["code"] for one in failures).items())),
        "content_sha256": manifest.content_sha256 if manifest else None,
        "manifest_sha256": manifest.manifest_sha256 if manifest else None,
    }


def write_run_files(
    store: Store, dataset_id: str, summary: dict[str, Any], failures: Sequence[dict[str, Any]]
) -> None:
    """Write both files; one that says the same already is left alone.

    Raises:
        StorageError: The root refused the write.
    """
    for name, value in (("failures", failures), ("summary", summary)):
        key = f"{RUNS}/{dataset_id}/{name}.json"
        data = canonical_json(value)
        if _stored(store, key) != data:
            store.put(key, data, mode="overwrite")


def _stored(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key)
    except NotFoundError:
        return None

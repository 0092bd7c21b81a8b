"""Explain how a request differs from the dataset that its id already stands for."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from wllm_ray.dataset.format.documents import read_receipt
from wllm_ray.dataset.format.layout import folder, manifest_key, receipt_key
from wllm_ray.dataset.format.manifest import DatasetSpec
from wllm_ray.dataset.format.rows import decode_rows
from wllm_ray.dataset.stores.store import Store
from wllm_ray.errors import ConflictError
from wllm_ray.records import RowRecord

__all__ = ["RowsOf", "conflict"]

RowsOf: TypeAlias = Callable[[int], Sequence[RowRecord]]
_LISTED = 20


def conflict(
    store: Store, existing: DatasetSpec, asked: DatasetSpec, rows_of: RowsOf | None
) -> ConflictError:
    """The error that names what differs.

    Fields, where one differs that is not the number of rows: it alone is why shards, and with them
    digests of rows, differ. Else shards and, given ``rows_of``, the staged rows. Of either the
    first 20 are listed, in text and details, and the others counted.
    """
    committed = store.size(manifest_key(asked.dataset_id)) is not None
    stored = existing.model_dump(exclude={"shards"})
    wanted = asked.model_dump(exclude={"shards"})
    fields = {
        name: {"stored": value, "asked": wanted[name]}
        for name, value in stored.items()
        if value != wanted[name]
    }
    told = [one for name in fields for one in _differences(name, stored[name], wanted[name])]
    shards = [] if fields.keys() - {"rows"} else _differing_shards(existing, asked)
    rows = _differing_rows(store, existing, shards, rows_of) if rows_of else []
    parts = [f"field {one}" for one in told[:_LISTED]]
    parts += [f"{len(told) - _LISTED} more fields"] if len(told) > _LISTED else []
    parts += [f"shards {_listed(shards)}"] if shards else []
    parts += [f"rows {_listed(rows)}"] if rows else []
    state = "is committed and cannot change" if committed else "was begun with another request"
    return ConflictError(
        f"dataset {asked.dataset_id!r} {state}; what differs: {', '.join(parts)}. Use another "
        f"dataset id, or the original input",
        code="dataset_immutable" if committed else "dataset_conflict",
        stage="create_spec",
        details={
            "fields": fields,
            "shards": shards[:_LISTED],
            "more_shards": len(shards[_LISTED:]),
            "rows": rows[:_LISTED],
            "more_rows": len(rows[_LISTED:]),
        },
    )


def _differences(name: str, stored: object, asked: object) -> Iterator[str]:
    """Field by field, as ``tokenizer.revision (stored 'a', asked 'b')``."""
    if isinstance(stored, dict) and isinstance(asked, dict):
        for key in dict.fromkeys((*stored, *asked)):
            if stored.get(key) != asked.get(key):
                yield from _differences(f"{name}.{key}", stored.get(key), asked.get(key))
        return
    yield f"{name} (stored {reprlib.repr(stored)}, asked {reprlib.repr(asked)})"


def _listed(values: Sequence[object]) -> str:
    more = len(values) - _LISTED
    return f"{values[:_LISTED]}" + (f" and {more} more" if more > 0 else "")


def _differing_shards(existing: DatasetSpec, asked: DatasetSpec) -> list[int]:
    count = max(len(existing.shards), len(asked.shards))
    return [n for n in range(count) if existing.shards[n : n + 1] != asked.shards[n : n + 1]]


def _differing_rows(
    store: Store, existing: DatasetSpec, shards: Sequence[int], rows_of: RowsOf
) -> list[str]:
    """Ids of the rows that are not both stored and asked, in shards that are staged or new.

    Where there is none, the same rows are in another order: those of the places that differ.
    """
    unpaired: dict[tuple[str, str], None] = {}
    moved: dict[str, None] = {}
    for shard in shards:
        stored: list[tuple[str, str]] = []
        if shard < len(existing.shards):
            if store.size(receipt_key(existing.dataset_id, shard)) is None:
                continue
            stored = _stored_rows(store, existing, shard)
        asked = [(row.id, row.request_digest) for row in rows_of(shard)]
        # A row that was inserted pushes others into the next shard, where they meet themselves.
        for row in stored + asked:
            if row in unpaired:
                del unpaired[row]
            else:
                unpaired[row] = None
        moved |= {
            mine[0]: None for mine, theirs in zip(stored, asked, strict=False) if mine != theirs
        }
    return list(dict.fromkeys(row_id for row_id, _ in unpaired) or moved)


def _stored_rows(store: Store, spec: DatasetSpec, shard: int) -> list[tuple[str, str]]:
    receipt = read_receipt(store.get(receipt_key(spec.dataset_id, shard)), spec, shard)
    entry = receipt.rows_file
    table = decode_rows(store.get(f"{folder(spec.dataset_id)}/{entry.name}"), entry.name)
    digests = (digest.hex() for digest in table.column("request_sha256").to_pylist())
    return list(zip(table.column("id").to_pylist(), digests, strict=True))

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
from wllm_ray.digest import sha256_hex
from wllm_ray.errors import ConflictError, IntegrityError, NotFoundError, StorageError, WLLMError
from wllm_ray.records import RowRecord

__all__ = ["RowsOf", "conflict"]

RowsOf: TypeAlias = Callable[[int], Sequence[RowRecord]]
_LISTED = 20
# Items of one list that are shown, and characters of a longer text, some before the difference.
_ITEMS = 3
_SHOWN, _BEFORE = 40, 12


def conflict(
    store: Store, existing: DatasetSpec, asked: DatasetSpec, rows_of: RowsOf | None
) -> ConflictError:
    """The error that names what differs.

    Fields, where one differs that is not the number of rows: it alone is why shards, and with them
    digests of rows, differ. Else shards and, given ``rows_of``, the staged rows. Of either the
    first 20 are listed, in text and details, and the others counted. Rows that cannot be read are
    no reason to say nothing of what else differs: their shards are told.
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
    unread: dict[int, WLLMError] = {}
    rows = _differing_rows(store, existing, shards, rows_of, unread) if rows_of else []
    parts = [f"field {one}" for one in told[:_LISTED]]
    parts += [f"{len(told) - _LISTED} more fields"] if len(told) > _LISTED else []
    parts += [f"shards {_listed(shards)}"] if shards else []
    parts += [f"rows {_listed(rows)}"] if rows else []
    parts += [_unread(unread)] if unread else []
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
        }
        | ({"unread_shards": list(unread)[:_LISTED]} if unread else {}),
    )


def _differences(name: str, stored: object, asked: object) -> Iterator[str]:
    """Field by field, as ``tokenizer.revision (stored 'a', asked 'b')``."""
    if isinstance(stored, dict) and isinstance(asked, dict):
        for key in dict.fromkeys((*stored, *asked)):
            if stored.get(key) != asked.get(key):
                yield from _differences(f"{name}.{key}", stored.get(key), asked.get(key))
        return
    if isinstance(stored, list | tuple) and isinstance(asked, list | tuple):
        yield from _differing_items(name, stored, asked)
        return
    start = _first_difference(stored, asked) - _BEFORE
    yield f"{name} (stored {_shown(stored, start)}, asked {_shown(asked, start)})"


def _differing_items(name: str, stored: Sequence[object], asked: Sequence[object]) -> Iterator[str]:
    """The items that differ; of lists of unlike lengths these, and the first item that differs."""
    both = list(zip(stored, asked, strict=False))
    places = [place for place, (mine, theirs) in enumerate(both) if mine != theirs]
    if len(stored) != len(asked):
        yield f"{name} (stored length {len(stored)}, asked length {len(asked)})"
        places = places[:1]
        if not places:
            whose, more = ("stored", stored) if len(stored) > len(asked) else ("asked", asked)
            yield f"{name}[{len(both)}] (only {whose}: {_shown(more[len(both)], 0)})"
    shown = [one for at in places[:_ITEMS] for one in _differences(f"{name}[{at}]", *both[at])]
    yield from shown[:-1]
    rest = len(places[_ITEMS:])
    yield from (one + (f" and {rest} more items" if rest else "") for one in shown[-1:])


def _first_difference(stored: object, asked: object) -> int:
    """Where two texts part, if one has no room to be shown whole; 0 otherwise."""
    if not (isinstance(stored, str) and isinstance(asked, str)):
        return 0
    if max(len(stored), len(asked)) <= _SHOWN:
        return 0
    pairs = enumerate(zip(stored, asked, strict=False))
    shorter = min(len(stored), len(asked))
    return next((at for at, (mine, theirs) in pairs if mine != theirs), shorter)


def _shown(value: object, start: int) -> str:
    """A value for a message; of a long text the part from ``start`` on, between marks."""
    if not isinstance(value, str):
        return reprlib.repr(value)
    start = max(0, start)
    part = value[start : start + _SHOWN]
    # As ASCII, since unlike texts may look alike.
    return f"{'…' if start else ''}{part!a}{'…' if start + _SHOWN < len(value) else ''}"


def _listed(values: Sequence[object]) -> str:
    more = len(values) - _LISTED
    return f"{values[:_LISTED]}" + (f" and {more} more" if more > 0 else "")


def _unread(errors: dict[int, WLLMError]) -> str:
    codes = dict.fromkeys(error.code for error in errors.values())
    return f"rows of shards {_listed(list(errors))} could not be compared ({', '.join(codes)})"


def _differing_shards(existing: DatasetSpec, asked: DatasetSpec) -> list[int]:
    count = max(len(existing.shards), len(asked.shards))
    return [n for n in range(count) if existing.shards[n : n + 1] != asked.shards[n : n + 1]]


def _differing_rows(
    store: Store,
    existing: DatasetSpec,
    shards: Sequence[int],
    rows_of: RowsOf,
    unread: dict[int, WLLMError],
) -> list[str]:
    """Ids of the rows that are not both stored and asked, in shards that are staged or new.

    Shards whose stored rows cannot be read are left out and put into ``unread``, with the reason.

    Where there is none, the same rows are in another order: those of the places that differ.
    """
    unpaired: dict[tuple[str, str], None] = {}
    moved: dict[str, None] = {}
    for shard in shards:
        stored: list[tuple[str, str]] = []
        if shard < len(existing.shards):
            try:
                if store.size(receipt_key(existing.dataset_id, shard)) is None:
                    continue
                stored = _stored_rows(store, existing, shard)
            except (IntegrityError, NotFoundError, StorageError) as error:
                unread[shard] = error
                continue
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
    data = store.get(f"{folder(spec.dataset_id)}/{entry.name}")
    if sha256_hex(data) != entry.sha256:
        raise IntegrityError(f"{entry.name}: another SHA-256 is recorded", code="digest_mismatch")
    table = decode_rows(data, entry.name)
    digests = (digest.hex() for digest in table.column("request_sha256").to_pylist())
    return list(zip(table.column("id").to_pylist(), digests, strict=True))

"""Make one dataset of several that were captured alike, without capturing anything again.

The shards stay as they are: features byte for byte, rows and traces with their numbers moved on.
The new dataset goes the way of every other: spec, files, receipts, manifest, each once. So a merge
that died is resumed by running it again, and two at once make one dataset.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Sequence

from wllm_ray.dataset.format.layout import check_dataset_id
from wllm_ray.dataset.format.manifest import Asked, DatasetSpec, Manifest, Receipt
from wllm_ray.dataset.reading.files import DatasetFiles, open_manifest
from wllm_ray.dataset.reading.recheck import check_manifest, check_rows
from wllm_ray.dataset.reading.repeated import RowIds
from wllm_ray.dataset.reading.staged import committed_receipts, load_spec
from wllm_ray.dataset.reading.verify import OnBytes, ignore_bytes
from wllm_ray.dataset.stores.store import Root, Store, open_store
from wllm_ray.dataset.tools.copying import Part, checked_rows, copied
from wllm_ray.dataset.writing.writer import (
    commit_manifest,
    create_spec,
    measured,
    put_receipt,
    staged_shards,
)
from wllm_ray.errors import ConflictError, InvalidInputError
from wllm_ray.records import Fingerprint

__all__ = ["merge_datasets"]

# What merged datasets need not have in common.
_OWN = frozenset({"dataset_id", "rows", "mixed_fingerprints"})
_LISTED = 20


def merge_datasets(
    root: Root,
    sources: Sequence[str],
    into: str,
    *,
    to_root: Root | None = None,
    mixed_fingerprints: bool = False,
    on_bytes: OnBytes = ignore_bytes,
) -> Manifest:
    """Write a new dataset that holds the rows of committed ones, one after the other.

    The sources are verified while they are read, and stay as they are. One source alone is copied:
    to another root it may keep its id.

    Args:
        root: Where the sources lie.
        sources: Their ids, in the order that their rows are to have.
        into: The id of the new dataset.
        to_root: Where it is to lie; ``root`` where omitted.
        mixed_fingerprints: Let engines that may differ numerically meet in one dataset.
        on_bytes: Told how many bytes are written, of how many.

    Raises:
        InvalidInputError: No source, one that is listed twice, or the new one among them, where
            it is to lie under the same root (``invalid_argument``).
        NotFoundError: A source is not committed (``dataset_not_found``).
        ConflictError: The sources differ in what was asked, or share a row id
            (``dataset_conflict``), or come from engines that may differ (``mixed_fingerprints``);
            or the new id stands for something else (``dataset_conflict``, ``dataset_immutable``).
        IntegrityError: A source is damaged, or what the new id stands for already. A source may
            turn out damaged when the new dataset is begun; then the message says how to go on.
        StorageError: A root failed to read or write.
    """
    store = open_store(root)
    target = store if to_root is None else open_store(to_root)
    _check_names(sources, into, is_elsewhere=target.uri != store.uri)
    opened = [DatasetFiles(store, open_manifest(store, one), "lazy") for one in sources]
    _expect_alike([files.manifest for files in opened])
    mixed = mixed_fingerprints or any(files.manifest.mixed_fingerprints for files in opened)
    parts = list(_parts(opened))
    if not mixed:
        _expect_one_fingerprint(parts)
    _expect_unique_ids(parts)
    spec = _merged_spec(opened, into, mixed=mixed)
    create_spec(target, spec)
    _copy_missing(target, spec, parts, on_bytes)
    return commit_manifest(target, into)


def _check_names(sources: Sequence[str], into: str, *, is_elsewhere: bool) -> None:
    check_dataset_id(into)
    names = [*sources] if is_elsewhere else [*sources, into]
    repeated = [one for one in names if names.count(one) > 1]
    if repeated or not sources:
        found = f"found {repeated[0]!a} twice" if repeated else "found none"
        raise InvalidInputError(
            f"a merge takes one dataset or more, each once, and an id that is not among them; "
            f"{found}",
            code="invalid_argument",
        )


def _expect_alike(manifests: Sequence[Manifest]) -> None:
    """Refuse sources that were not asked for the same, but for the rows."""
    first = manifests[0]
    for other in manifests[1:]:
        fields = [
            name
            for name in Asked.model_fields
            if name not in _OWN and getattr(first, name) != getattr(other, name)
        ]
        if fields:
            differ = {name: (getattr(first, name), getattr(other, name)) for name in fields}
            shown = "; ".join(
                f"{name} is {reprlib.repr(a)} and {reprlib.repr(b)}"
                for name, (a, b) in differ.items()
            )
            raise ConflictError(
                f"datasets {first.dataset_id!r} and {other.dataset_id!r} were not asked for the "
                f"same ({shown}), so they cannot become one; nothing was written. Capture one of "
                f"them again, asked as the other was",
                stage="merge",
                details={"fields": fields},
            )


def _parts(opened: Sequence[DatasetFiles]) -> Iterator[Part]:
    """All shards in their new order, each with the receipt that its manifest was made from."""
    shard = first_row = 0
    for files in opened:
        spec = load_spec(files.store, files.manifest.dataset_id)
        receipts = committed_receipts(files.store, spec, files.manifest)
        check_manifest(files.manifest, receipts)
        for entry in files.manifest.shards:
            yield Part(files, entry, receipts[entry.shard], shard, first_row)
            shard, first_row = shard + 1, first_row + entry.rows


def _expect_one_fingerprint(parts: Sequence[Part]) -> None:
    first: tuple[str, Fingerprint] | None = None
    for part in parts:
        found, name = part.receipt.fingerprint, part.files.manifest.dataset_id
        if found is None:
            continue
        first = first or (name, found)
        fields = [n for n in Fingerprint.model_fields if getattr(found, n) != getattr(first[1], n)]
        if fields:
            raise ConflictError(
                f"datasets {first[0]!r} and {name!r} come from engines that may differ "
                f"numerically ({', '.join(fields)}), so nothing was written; ask for "
                f"mixed_fingerprints (--mixed-fingerprints) if that is what you want",
                code="mixed_fingerprints",
                stage="merge",
                details={"fields": fields},
            )


def _expect_unique_ids(parts: Sequence[Part]) -> None:
    """Refuse row ids that two sources have; checks every rows table on the way."""
    ids = RowIds()
    for part in parts:
        batch = checked_rows(part)
        check_rows(batch, part.entry, part.files.manifest.position)
        ids.add(part.shard, batch.column("id").to_pylist())

    def ids_of(number: int) -> list[str]:
        found: list[str] = checked_rows(parts[number]).column("id").to_pylist()
        return found

    if repeated := list(ids.repeated(ids_of)):
        row_id, before, here = repeated[0]
        names = [parts[place.table].files.manifest.dataset_id for place in (before, here)]
        raise ConflictError(
            f"row id {row_id!a} is in dataset {names[0]!r} and in {names[1]!r} ({len(repeated)} "
            f"such in all), and ids are unique in a dataset; nothing was written. Capture one of "
            f"them again under other row ids",
            stage="merge",
            details={"row_ids": [one[0] for one in repeated[:_LISTED]], "count": len(repeated)},
        )


def _merged_spec(opened: Sequence[DatasetFiles], into: str, *, mixed: bool) -> DatasetSpec:
    shards = []
    first_row = 0
    for files in opened:
        for shard in files.manifest.spec().shards:
            shards.append(shard.model_copy(update={"first_row": first_row}))
            first_row += shard.rows
    own = {"dataset_id": into, "rows": first_row, "mixed_fingerprints": mixed}
    asked = {name: getattr(opened[0].manifest, name) for name in Asked.model_fields}
    return DatasetSpec(**(asked | own), shards=tuple(shards))


def _copy_missing(
    target: Store,
    spec: DatasetSpec,
    parts: Sequence[Part],
    on_bytes: OnBytes,
) -> None:
    total = sum(entry.bytes for part in parts for entry in part.entry.files)
    done = 0
    staged = staged_shards(target, spec)
    for part in parts:
        standing = staged.get(part.shard)
        if standing is None:
            result = put_receipt(target, spec, copied(target, spec, part))
            standing = result.receipt if result.superseded else None
        if standing is not None:
            _expect_same(spec, part, standing)
        done += sum(entry.bytes for entry in part.entry.files)
        on_bytes(done, total)


def _expect_same(spec: DatasetSpec, part: Part, standing: Receipt) -> None:
    """The shard that stands already is a copy of this one, not of another capture of the rows.

    Raises:
        ConflictError: It holds other features, or another engine's (``dataset_conflict``).
    """
    if measured(standing) != measured(part.receipt):
        raise ConflictError(
            f"shard {part.shard} of dataset {spec.dataset_id!r} stands already, and shard "
            f"{part.entry.shard} of {part.files.manifest.dataset_id!r} holds the same rows, "
            f"captured another time (other values, or another engine). Nothing was changed; merge "
            f"into another id",
            stage="merge",
            details={"shard": part.shard},
        )

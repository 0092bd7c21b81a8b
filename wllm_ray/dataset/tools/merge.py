"""Make one dataset of several that were captured alike, without capturing anything again.

The shards stay as they are: features and traces byte for byte, rows with their numbers moved on.
The new dataset goes the way of every other: spec, files, receipts, manifest, each once. So a merge
that died is resumed by running it again, and two at once make one dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from wllm_ray.dataset.format.layout import check_dataset_id, content_prefix, file_name
from wllm_ray.dataset.format.manifest import (
    Asked,
    DatasetSpec,
    FileEntry,
    Manifest,
    Receipt,
    ShardEntry,
)
from wllm_ray.dataset.reading.files import DatasetFiles, open_manifest
from wllm_ray.dataset.reading.recheck import check_manifest, check_rows
from wllm_ray.dataset.reading.repeated import RowIds
from wllm_ray.dataset.reading.rowtable import good_rows
from wllm_ray.dataset.reading.staged import committed_receipts, load_spec
from wllm_ray.dataset.reading.verify import OnBytes, ignore_bytes
from wllm_ray.dataset.stores.store import Root, Store, open_store
from wllm_ray.dataset.writing.writer import (
    commit_manifest,
    create_spec,
    measured,
    put_receipt,
    staged_shards,
)
from wllm_ray.errors import ConflictError, IntegrityError, InvalidInputError
from wllm_ray.records import Fingerprint

__all__ = ["merge_datasets"]

# What merged datasets need not have in common.
_OWN = frozenset({"dataset_id", "rows", "mixed_fingerprints"})
_LISTED = 20


@dataclass(frozen=True, slots=True)
class _Part:
    """A shard of a source, and its place in the new dataset."""

    files: DatasetFiles
    entry: ShardEntry
    receipt: Receipt
    shard: int
    first_row: int


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
        IntegrityError: A source is damaged. Where features or traces are, the new dataset was begun
            by then; the message says how to go on.
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
    try:
        _copy_missing(target, spec, parts, on_bytes)
    except IntegrityError as error:
        raise _left_begun(error, target, into) from error
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
            shown = "; ".join(f"{name} is {a} and {b}" for name, (a, b) in differ.items())
            raise ConflictError(
                f"datasets {first.dataset_id!r} and {other.dataset_id!r} were not asked for the "
                f"same ({shown}), so they cannot become one; nothing was written",
                stage="merge",
                details={"fields": fields},
            )


def _parts(opened: Sequence[DatasetFiles]) -> Iterator[_Part]:
    """All shards in their new order, each with the receipt that its manifest was made from."""
    shard = first_row = 0
    for files in opened:
        spec = load_spec(files.store, files.manifest.dataset_id)
        receipts = committed_receipts(files.store, spec, files.manifest)
        check_manifest(files.manifest, receipts)
        for entry in files.manifest.shards:
            yield _Part(files, entry, receipts[entry.shard], shard, first_row)
            shard, first_row = shard + 1, first_row + entry.rows


def _expect_one_fingerprint(parts: Sequence[_Part]) -> None:
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
                f"mixed_fingerprints if that is what you want",
                code="mixed_fingerprints",
                stage="merge",
                details={"fields": fields},
            )


def _expect_unique_ids(parts: Sequence[_Part]) -> None:
    """Refuse row ids that two sources have; checks every rows table on the way."""
    ids = RowIds()
    for part in parts:
        batch = part.files.rows(part.entry.shard)
        check_rows(batch, part.entry, part.files.manifest.position)
        ids.add(part.shard, batch.column("id").to_pylist())

    def ids_of(number: int) -> list[str]:
        part = parts[number]
        found: list[str] = part.files.rows(part.entry.shard).column("id").to_pylist()
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
    parts: Sequence[_Part],
    on_bytes: OnBytes,
) -> None:
    total = sum(entry.bytes for part in parts for entry in part.entry.files)
    done = 0
    staged = staged_shards(target, spec)
    for part in parts:
        standing = staged.get(part.shard)
        if standing is None:
            result = put_receipt(target, spec, _copied(target, spec, part))
            standing = result.receipt if result.superseded else None
        if standing is not None:
            _expect_same(spec, part, standing)
        done += sum(entry.bytes for entry in part.entry.files)
        on_bytes(done, total)


def _left_begun(error: IntegrityError, target: Store, into: str) -> IntegrityError:
    """The same error, and what it means for the new dataset."""
    return IntegrityError(
        f"{error.message}. Dataset {into!r} was begun under {target.uri}: mend the source and "
        f"merge again, which goes on from there, or give it up with `wllm gc {target.uri} {into} "
        f"--abandon --older-than 0 --delete`",
        code=error.code,
        stage="merge",
        details=error.details,
    )


def _expect_same(spec: DatasetSpec, part: _Part, standing: Receipt) -> None:
    """The shard that stands already is a copy of this one, not of another capture of the rows.

    Raises:
        ConflictError: It holds other features (``dataset_conflict``).
    """
    if measured(standing) != measured(part.receipt):
        raise ConflictError(
            f"shard {part.shard} of dataset {spec.dataset_id!r} stands already and holds other "
            f"features than shard {part.entry.shard} of {part.files.manifest.dataset_id!r}: the "
            f"same rows, captured another time. Nothing was changed; merge into another id",
            stage="merge",
            details={"shard": part.shard},
        )


def _copied(target: Store, spec: DatasetSpec, part: _Part) -> Receipt:
    """The receipt of a shard whose files are copied."""
    files = tuple(_copied_file(target, spec, part, entry) for entry in part.entry.files)
    own = {
        "spec_sha256": spec.sha256,
        "shard": part.shard,
        "first_row": part.first_row,
        "files": files,
    }
    return part.receipt.model_copy(update=own)


def _copied_file(target: Store, spec: DatasetSpec, part: _Part, entry: FileEntry) -> FileEntry:
    suffix = entry.name.removeprefix(file_name(part.entry.shard, entry.sha256, ""))
    prefix = content_prefix(spec.dataset_id, part.shard)
    stored = target.put_content(prefix, suffix, _content(part, entry))
    name = stored.key.rpartition("/")[2]
    return entry.model_copy(update={"name": name, "bytes": stored.bytes, "sha256": stored.sha256})


def _content(part: _Part, entry: FileEntry) -> memoryview:
    """What a file of the shard is to hold in the new dataset; all that is read is verified."""
    files, shard = part.files, part.entry.shard
    if entry.role == "rows":
        return _renumbered(files.rows(shard), part.first_row - part.entry.first_row)
    raw = files.raw(entry)
    if entry.role == "trace":
        files.traces(shard, good_rows(files.rows(shard)))
        batch = pa.ipc.open_file(pa.py_buffer(raw)).get_batch(0)
        return _renumbered(batch, part.first_row - part.entry.first_row)
    files.checked(shard, part.entry.features_files.index(entry), raw)
    return raw.data


def _renumbered(batch: pa.RecordBatch, distance: int) -> memoryview:
    """The same Arrow file, its rows moved on."""
    at = batch.schema.get_field_index("row")
    numbers = pc.add(batch.column(at), distance)
    moved = batch.set_column(at, batch.schema.field(at), numbers)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(moved)
    return memoryview(sink.getvalue())

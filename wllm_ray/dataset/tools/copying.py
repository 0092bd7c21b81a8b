"""Copy a shard of a committed dataset into another one: the very bytes that were checked.

An object store may answer twice and differ, and a local file may change where it lies. So each
file is read into memory of its own, once for each use, and what is written is made of that.
"""

from __future__ import annotations

import contextlib
import hashlib
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from wllm_ray.dataset.format.layout import content_prefix, file_name
from wllm_ray.dataset.format.manifest import DatasetSpec, FileEntry, Receipt, ShardEntry
from wllm_ray.dataset.format.trace import decode_traces
from wllm_ray.dataset.reading.files import DatasetFiles
from wllm_ray.dataset.reading.rowtable import good_rows, read_rows
from wllm_ray.dataset.stores.store import Store
from wllm_ray.errors import IntegrityError

__all__ = ["Part", "checked_rows", "copied"]


@dataclass(frozen=True, slots=True)
class Part:
    """A shard of a source, and its place in the new dataset."""

    files: DatasetFiles
    entry: ShardEntry
    receipt: Receipt
    shard: int
    first_row: int

    @property
    def distance(self) -> int:
        """By how much the numbers of its rows move on."""
        return self.first_row - self.entry.first_row


def copied(target: Store, spec: DatasetSpec, part: Part) -> Receipt:
    """Write the files of a shard once more, and make its receipt.

    Args:
        target: The storage root to write to.
        spec: The new dataset's.
        part: The shard.

    Raises:
        IntegrityError: The source is damaged; the message says how to go on.
        StorageError: A root failed to read or write.
    """
    files = tuple(_copied_file(target, spec, part, entry) for entry in part.entry.files)
    own = {
        "spec_sha256": spec.sha256,
        "shard": part.shard,
        "first_row": part.first_row,
        "files": files,
    }
    return part.receipt.model_copy(update=own)


def checked_rows(part: Part) -> pa.RecordBatch:
    """The rows table of a shard, read anew and checked anew.

    Raises:
        IntegrityError: It is damaged.
    """
    data = _checked(part, part.entry.rows_file)
    return read_rows(data, part.entry, part.files.manifest.position)


def _copied_file(target: Store, spec: DatasetSpec, part: Part, entry: FileEntry) -> FileEntry:
    suffix = entry.name.removeprefix(file_name(part.entry.shard, entry.sha256, ""))
    with _saying_how_to_go_on(target, spec.dataset_id):
        data = _content(part, entry)
    stored = target.put_content(content_prefix(spec.dataset_id, part.shard), suffix, data)
    if _stays(part, entry):
        with _saying_how_to_go_on(target, spec.dataset_id):
            part.files.expect_digest(entry, stored.sha256)
    name = stored.key.rpartition("/")[2]
    return entry.model_copy(update={"name": name, "bytes": stored.bytes, "sha256": stored.sha256})


def _stays(part: Part, entry: FileEntry) -> bool:
    """Whether the copy of a file is to have the same bytes: row numbers are in the others."""
    return entry.role == "features" or not part.distance


def _content(part: Part, entry: FileEntry) -> memoryview:
    """What a file of the shard is to hold in the new dataset; all that is read is verified."""
    if entry.role == "features":
        raw = part.files.fetched(entry)
        part.files.checked(part.entry.shard, part.entry.features_files.index(entry), raw)
        return raw.data
    raw = _checked(part, entry)
    if entry.role == "rows":
        batch = read_rows(raw, part.entry, part.files.manifest.position)
    else:
        decode_traces(part.files.manifest, raw, good_rows(checked_rows(part)), entry.name)
        batch = pa.ipc.open_file(pa.py_buffer(raw)).get_batch(0)
    return raw.data if _stays(part, entry) else _renumbered(batch, part.distance)


def _checked(part: Part, entry: FileEntry) -> NDArray[np.uint8]:
    """A whole file in memory of its own, its digest checked there, whatever was checked before."""
    data = part.files.fetched(entry)
    part.files.expect_digest(entry, hashlib.sha256(data.data).hexdigest())
    return data


def _renumbered(batch: pa.RecordBatch, distance: int) -> memoryview:
    """The same Arrow file, its rows moved on."""
    at = batch.schema.get_field_index("row")
    numbers = pc.add(batch.column(at), distance)
    moved = batch.set_column(at, batch.schema.field(at), numbers)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(moved)
    return memoryview(sink.getvalue())


@contextlib.contextmanager
def _saying_how_to_go_on(target: Store, into: str) -> Iterator[None]:
    """Say of a damaged source what it means for the new dataset.

    Raises:
        IntegrityError: The same error with another message.
    """
    try:
        yield
    except IntegrityError as error:
        raise IntegrityError(
            f"{error.message}. Dataset {into!r} was begun under {target.uri}: mend the source and "
            f"merge again, which goes on from there, or give it up with `wllm gc "
            f"{shlex.quote(target.uri)} {into} --abandon --older-than 0 --delete`",
            code=error.code,
            stage="merge",
            details=error.details,
        ) from error

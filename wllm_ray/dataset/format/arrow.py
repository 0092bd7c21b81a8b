"""Arrow files as this format has them: one schema, one record batch, nothing compressed.

A file is looked into before Arrow reads it. What is compressed may unpack to more memory than
there is, and Arrow unpacks a batch before anybody could ask how large it is.
"""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa

from wllm_ray.errors import IntegrityError

__all__ = ["one_line", "read_batch"]

# Fields of Arrow's flatbuffers, as its File.fbs and Message.fbs number them.
_FOOTER_DICTIONARIES, _FOOTER_BATCHES = 2, 3
_MESSAGE_HEADER = 2
_BATCH_COMPRESSION = 3
# The length of the footer, and "ARROW1" once more.
_FILE_END_BYTES = 10
# Of a message: four bytes that are all ones, and its length.
_MESSAGE_START_BYTES = 8


def read_batch(data: Any, schema: pa.Schema, name: str, *, code: str) -> pa.RecordBatch:
    """The one record batch of an Arrow IPC file, as views of the file.

    Args:
        data: The file: bytes or a memory map.
        schema: What it must have, metadata included.
        name: The file, for the message.
        code: Of the error.

    Raises:
        IntegrityError: It is something else, with ``code``.
    """
    try:
        file = pa.py_buffer(data)
        reader = pa.ipc.open_file(file)
        found = None
        if not reader.schema.equals(schema, check_metadata=True):
            found = f"the schema {one_line(reader.schema)}"
        elif reader.num_record_batches != 1:
            found = f"{reader.num_record_batches} record batches"
        elif not _is_plain(memoryview(file)):
            found = "one that is compressed or has dictionaries"
        if found is None:
            batch = reader.get_batch(0)
            batch.validate(full=True)
    except (pa.ArrowException, OSError, MemoryError, struct.error) as error:
        raise _other(name, schema, type(error).__name__, code) from error
    if found is not None:
        raise _other(name, schema, found, code)
    return batch


def one_line(schema: pa.Schema) -> str:
    """A schema for a message."""
    return ascii(schema.remove_metadata().to_string().replace("\n", ", "))[1:-1]


def _other(name: str, schema: pa.Schema, found: str, code: str) -> IntegrityError:
    return IntegrityError(
        f"{name}: expected an Arrow IPC file with one record batch, uncompressed, of the schema "
        f"{one_line(schema)} with the metadata of this format, found {found}; restore the file "
        f"from a copy",
        code=code,
    )


def _is_plain(file: memoryview) -> bool:
    """Whether the first record batch is all that the file holds, and as it will be in memory."""
    end = len(file) - _FILE_END_BYTES
    footer = _target(file, end - _int(file, "<i", end))
    dictionaries = _field(file, footer, _FOOTER_DICTIONARIES)
    if dictionaries is not None and _int(file, "<i", _target(file, dictionaries)):
        return False
    batches = _field(file, footer, _FOOTER_BATCHES)
    if batches is None:
        return False
    start = _int(file, "<q", _target(file, batches) + 4)
    header = _field(file, _target(file, start + _MESSAGE_START_BYTES), _MESSAGE_HEADER)
    if _int(file, "<i", start) != -1 or header is None:
        return False
    return _field(file, _target(file, header), _BATCH_COMPRESSION) is None


def _field(file: memoryview, table: int, number: int) -> int | None:
    """Where a field of a flatbuffers table stands; None where the table lacks it."""
    layout = table - _int(file, "<i", table)
    place = 4 + 2 * number
    offset = _int(file, "<H", layout + place) if place < _int(file, "<H", layout) else 0
    return table + offset if offset else None


def _target(file: memoryview, at: int) -> int:
    """What a flatbuffers offset points to."""
    return at + _int(file, "<i", at)


def _int(file: memoryview, kind: str, at: int) -> int:
    if at < 0:  # which Python would count from the end
        raise struct.error
    number: int = struct.unpack_from(kind, file, at)[0]
    return number

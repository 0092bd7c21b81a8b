"""The features files of a shard as bytes: one array, in ``.npy`` or in ``.arrow``.

Writing is deterministic and copies no value. Reading trusts nothing: a ``.npy`` header must be
exactly the one that the recorded shape gives, an Arrow file must have exactly the schema below and
its values inside the file.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wllm_ray.dataset.format.arrow import one_line, read_batch
from wllm_ray.dataset.format.dtypes import Dtype, all_finite, numpy_dtype
from wllm_ray.dataset.format.manifest import Asked, FeatureArray
from wllm_ray.digest import canonical_json
from wllm_ray.errors import IntegrityError

__all__ = [
    "Part",
    "Parts",
    "decode_features",
    "encode_features",
    "features_bytes",
    "npy_header",
    "sha256_and_finite",
    "values_of",
]

NPY_HEADER_BYTES = 128
ARROW_FORMAT = {"format": "wllm_ray.features", "format_version": "1"}
_ARROW_TYPES: dict[Dtype, pa.DataType] = {
    "float32": pa.float32(),
    "bfloat16": pa.uint16(),
    "float16": pa.float16(),
}
# Bytes that are checked and then hashed. Each is a call without the interpreter lock, which has to
# be waited for afterwards where other threads are busy: so not too little at once. Nor so much that
# hashing finds nothing of it in the cache.
_CHECKED_AT_ONCE = 32 << 20

Part = bytes | memoryview


def encode_features(
    asked: Asked, array: FeatureArray, blocks: Sequence[NDArray[Any]], rows: int
) -> list[Part]:
    """A whole features file, in parts to be written one after the other.

    Args:
        asked: Says format and dtype.
        array: Which array.
        blocks: Its feature rows, as stored, [n, …] each in C order; they are not copied.
        rows: How many there are together.
    """
    body = [memoryview(block.data).cast("B") for block in blocks if block.size]
    if asked.shard_format == "npy":
        return [npy_header((rows, *array.axes), asked.dtype), *body]
    before, after = _arrow_frame(asked, array, rows)
    return [before, *body, after]


def features_bytes(asked: Asked, array: FeatureArray, rows: int) -> range:
    """Sizes that the file may have: one for ``.npy``, all that can hold the values for Arrow."""
    values = rows * math.prod(array.axes) * numpy_dtype(asked.dtype).itemsize
    if asked.shard_format == "npy":
        return range(NPY_HEADER_BYTES + values, NPY_HEADER_BYTES + values + 1)
    return range(values + 1, 1 << 63)


def decode_features(
    asked: Asked, array: FeatureArray, raw: NDArray[np.uint8], rows: int, name: str
) -> NDArray[Any]:
    """View the array inside a whole features file, without copying.

    Args:
        asked: Says format and dtype.
        array: Which array.
        raw: The file, [bytes] uint8.
        rows: How many feature rows the manifest says.
        name: The file, for the message.

    Returns:
        [rows, …] as stored (bfloat16 as uint16), writable where ``raw`` is.

    Raises:
        IntegrityError: ``size_mismatch``, or ``array_invalid`` where header or schema are not
            exactly those of the recorded shape, which also refuses pickled objects and Fortran
            order.
    """
    shape = (rows, *array.axes)
    wanted = features_bytes(asked, array, rows)
    if raw.size not in wanted:
        raise IntegrityError(
            f"{name}: expected {wanted.start} bytes for shape {shape}, found {raw.size}; the "
            f"file is truncated or not the one that was committed",
            code="size_mismatch",
        )
    if asked.shard_format == "npy":
        start = _npy_start(raw, shape, asked.dtype, name)
    else:
        start = _arrow_start(asked, array, raw, rows, name)
    dtype = numpy_dtype(asked.dtype)
    return raw[start : start + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)


def sha256_and_finite(
    raw: NDArray[np.uint8], values: NDArray[Any], dtype: Dtype
) -> tuple[str, bool]:
    """SHA-256 of a features file and whether its values are finite, reading it once.

    Args:
        raw: The whole file, [bytes] uint8.
        values: The array inside it, from :func:`decode_features`.
        dtype: How the values are stored.
    """
    flat = values.reshape(-1)
    start = values.ctypes.data - raw.ctypes.data if flat.size else raw.size
    total = hashlib.sha256(raw[:start].data)
    finite = True
    step = _CHECKED_AT_ONCE // flat.itemsize
    for at in range(0, flat.size, step):
        block = flat[at : at + step]
        # In this order: it is the cheap reading that waits for the memory, not the other.
        finite = finite and all_finite(block, dtype)
        total.update(block.view(np.uint8).data)
    total.update(raw[start + flat.nbytes :].data)
    return total.hexdigest(), finite


def npy_header(shape: tuple[int, ...], dtype: Dtype) -> bytes:
    """The 128 bytes before the data of a C-ordered little-endian array."""
    descr = numpy_dtype(dtype).str
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00\x76\x00" + text.ljust(NPY_HEADER_BYTES - 11).encode() + b"\n"


def arrow_schema(asked: Asked, array: FeatureArray) -> pa.Schema:
    """The schema of an Arrow features file: one column, of which no value can be null."""
    column = _ARROW_TYPES[asked.dtype]
    for length in reversed(array.axes):
        column = pa.list_(pa.field("item", column, nullable=False), length)
    sites = asked.sites if array.site is None else (array.site,)
    metadata = ARROW_FORMAT | {"dtype": asked.dtype, "sites": canonical_json(sites).decode()}
    name = "features" if array.site is None else array.site
    return pa.schema([pa.field(name, column, nullable=False)], metadata=metadata)


def _npy_start(raw: NDArray[np.uint8], shape: tuple[int, ...], dtype: Dtype, name: str) -> int:
    """Where the values begin."""
    found, wanted = raw[:NPY_HEADER_BYTES].tobytes(), npy_header(shape, dtype)
    if found != wanted:
        raise IntegrityError(
            f"{name}: expected the .npy header {wanted[10:].decode().rstrip()}, found "
            f"{ascii(found[10:].rstrip())[1:]}",
            code="array_invalid",
        )
    return NPY_HEADER_BYTES


def _arrow_start(
    asked: Asked, array: FeatureArray, raw: NDArray[np.uint8], rows: int, name: str
) -> int:
    """Where the values begin in an Arrow file."""
    schema = arrow_schema(asked, array)
    batch = read_batch(raw, schema, name, code="array_invalid")
    values = values_of(batch.column(0))
    if batch.num_rows != rows or values is None:
        raise _not_this_array(name, schema, f"{batch.num_rows} rows, or null values")
    if not values.size:
        return raw.size
    start = values.ctypes.data - raw.ctypes.data
    # What Arrow swapped to this machine's byte order lies in memory of its own.
    if not 0 <= start <= raw.size - values.nbytes:
        raise _not_this_array(name, schema, "values that are big-endian")
    return start


def values_of(column: pa.Array) -> NDArray[Any] | None:
    """The values of nested fixed-size lists as one flat array, not copied; None if any is null."""
    length = len(column)
    while pa.types.is_fixed_size_list(column.type):
        if column.null_count:
            return None
        length *= column.type.list_size
        start = column.offset * column.type.list_size
        column = column.values.slice(start, len(column) * column.type.list_size)
    if column.null_count or len(column) != length:
        return None
    values: NDArray[Any] = column.to_numpy(zero_copy_only=True)
    return values


def _not_this_array(name: str, schema: pa.Schema, found: str) -> IntegrityError:
    return IntegrityError(
        f"{name}: expected an Arrow IPC file with one record batch of the schema "
        f"{one_line(schema)}, found {found}",
        code="array_invalid",
    )


class Parts(io.RawIOBase):
    """Collects what a file is written in; large buffers are kept, not copied."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def writable(self) -> bool:
        """Always."""
        return True

    def write(self, part: Any) -> int:
        """Keep a part."""
        self.parts.append(part)
        return len(part)


def _arrow_frame(asked: Asked, array: FeatureArray, rows: int) -> tuple[bytes, bytes]:
    """What stands before and after the values in an Arrow file.

    Arrow writes a whole array or none, and our values lie in several. So it is given one of the
    same size whose memory nobody ever touches, and which therefore takes up none.
    """
    schema = arrow_schema(asked, array)
    values = pa.array(np.empty(rows * math.prod(array.axes), numpy_dtype(asked.dtype)))
    column, body = values, values.buffers()[1]
    for size in _list_types(schema.field(0).type):
        column = pa.FixedSizeListArray.from_arrays(column, type=size)
    sink = Parts()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([column], schema=schema))
    if not len(values):
        return b"".join(map(bytes, sink.parts)), b""
    (cut,) = [n for n, part in enumerate(sink.parts) if _is(part, body)]
    before, after = sink.parts[:cut], sink.parts[cut + 1 :]
    return b"".join(map(bytes, before)), b"".join(map(bytes, after))


def _is(part: Any, body: pa.Buffer) -> bool:
    return isinstance(part, pa.Buffer) and part.address == body.address


def _list_types(outermost: pa.DataType) -> list[pa.DataType]:
    """The types of nested fixed-size lists, the innermost first."""
    types = []
    while pa.types.is_fixed_size_list(outermost):
        types.append(outermost)
        outermost = outermost.value_type
    return types[::-1]

"""Lies in files whose digests are right: arrays and tables that are not what they should be."""

from __future__ import annotations

import io
import json
import os
import pickle

import numpy as np
import pyarrow as pa
from forging import arrow_file, batch_of, cell, pair, replaced, table
from hostile_lies import CONTRADICTS

from wllm_ray.digest import canonical_json


class Bomb:
    """What runs where anything is unpickled."""

    def __reduce__(self):
        return os._exit, (66,)


def npy(change):
    """Another array in the features file, by NumPy's own hand."""

    def make(data):
        sink = io.BytesIO()
        np.save(sink, change(np.load(io.BytesIO(data))), allow_pickle=True)
        return sink.getvalue()

    return make


def failure(**changes):
    text = {"code": "too_long", "message": "m", "permanent": True, "stage": "tokenize"} | changes
    return canonical_json(text).decode()


def unsorted(text):
    return json.dumps(dict(reversed(json.loads(text).items())), separators=(",", ":"))


def wide_header(data):
    """As NumPy may write it: the same array behind a header of 192 bytes."""
    return b"\x93NUMPY\x01\x00\xb6\x00" + data[10:127] + b" " * 64 + b"\n" + data[128:]


def version_2(data):
    return b"\x93NUMPY\x02\x00\x74\x00\x00\x00" + data[10:125] + b"\n" + data[128:]


def retyped(name, to):
    """Exchange the type of a column."""

    def change(batch):
        number = batch.schema.get_field_index(name)
        field = pa.field(name, to, nullable=batch.schema.field(number).nullable)
        return batch.set_column(number, field, batch.column(number).cast(to))

    return change


def values_changed(column, change):
    def do(batch):
        number = batch.schema.get_field_index(column)
        values = change(batch.column(number).to_pylist())
        field = batch.schema.field(number)
        return batch.set_column(number, field, pa.array(values, field.type))

    return do


def two_batches(data):
    batch = batch_of(data)
    return arrow_file([batch.slice(0, 1), batch.slice(1)])


def no_batch(data):
    return arrow_file([], batch_of(data).schema)


def as_stream(data):
    batch = batch_of(data)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def with_metadata(**metadata):
    return lambda batch: batch.replace_schema_metadata({**batch.schema.metadata, **metadata})


def huge_buffer(data):
    """The first buffer of some size is said to have a terabyte."""
    batch = batch_of(data)
    sizes = [b.size for column in batch.columns for b in column.buffers() if b and b.size]
    for size in sizes:
        for start in range(0, 4096, 8):
            if pair(start, size) in data:
                return data.replace(pair(start, size), pair(start, 1 << 40), 1)
    raise AssertionError(sizes)


def huge_length(data):
    """A column is said to have 2^40 values."""
    rows = batch_of(data).num_rows
    return replaced(pair(rows, 0), pair(1 << 40, 0))(data)


def negative_length(data):
    rows = batch_of(data).num_rows
    return replaced(pair(rows, 0), pair(-1, 0))(data)


def bomb(data):
    """A table that is small on disk, with a gigabyte of metadata in its last row."""
    batch = batch_of(data)
    size = 1 << 30
    offsets = np.array([*[0] * batch.num_rows, size], np.int64)
    # Memory that nobody has written to takes up none.
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(np.zeros(size, np.uint8))]
    column = pa.Array.from_buffers(pa.large_string(), batch.num_rows, buffers)
    number = batch.schema.get_field_index("metadata")
    field = batch.schema.field(number)
    return arrow_file([batch.set_column(number, field, column)], compression="zstd")


def lying_bomb(data):
    """Compressed, and the first buffer is said to unpack to a terabyte."""
    packed = table(lambda batch: batch, compression="zstd")(data)
    at = packed.index(b"\x28\xb5\x2f\xfd") - 8
    return packed[:at] + (1 << 40).to_bytes(8, "little") + packed[at + 8 :]


# The manifest says so itself, before any file is opened.
SIZE = "size_mismatch"
NPY = {
    "pickled objects": (npy(lambda a: np.array([Bomb()] * a.size, object)), SIZE),
    "a header of pickled objects": (replaced(b"'<f4'", b"'|O' "), "array_invalid"),
    "Fortran order": (replaced(b"'fortran_order': False", b"'fortran_order': True "), None),
    "big-endian": (replaced(b"'<f4'", b"'>f4'"), "array_invalid"),
    "integers": (replaced(b"'<f4'", b"'<i4'"), "array_invalid"),
    "native byte order": (replaced(b"'<f4'", b"'=f4'"), "array_invalid"),
    "a wider header": (wide_header, SIZE),
    "version 2.0": (version_2, "array_invalid"),
    "other padding": (lambda data: data[:126] + b"\t" + data[127:], "array_invalid"),
    "another shape": (replaced(b"(2, 1, 4)", b"(1, 2, 4)"), "array_invalid"),
    "a huge shape": (replaced(b"(2, 1, 4), }   ", b"(2**62, 1, 4), }"[:15]), "array_invalid"),
    "code in the header": (replaced(b"'<f4'", b"a()  "), "array_invalid"),
    "NaN": (lambda data: data[:-4] + np.float32("nan").tobytes(), "values_not_finite"),
    "infinity": (lambda data: data[:-4] + np.float32("-inf").tobytes(), "values_not_finite"),
    "doubles": (npy(lambda a: a.astype("<f8")), SIZE),
}
ROWS = {
    "not Arrow": (lambda data: b"\x80" * len(data), "table_invalid"),
    "pickled": (lambda _: pickle.dumps(Bomb()), "table_invalid"),
    "Arrow's magic alone": (lambda _: b"ARROW1\0\0ARROW1", "table_invalid"),
    "a stream": (as_stream, "table_invalid"),
    "a column less": (table(lambda b: b.drop_columns(["failure"])), "table_invalid"),
    "a column more": (table(lambda b: b.append_column("x", b.column("row"))), "table_invalid"),
    "a column twice": (table(lambda b: b.append_column("row", b.column("row"))), "table_invalid"),
    "another order": (table(lambda b: b.select(b.schema.names[::-1])), "table_invalid"),
    "32-bit offsets": (table(retyped("id", pa.string())), "table_invalid"),
    "32-bit row numbers": (table(retyped("row", pa.int32())), "table_invalid"),
    "a dictionary": (
        table(retyped("status", pa.dictionary(pa.int32(), pa.large_string()))),
        "table_invalid",
    ),
    "no metadata": (table(lambda b: b.replace_schema_metadata(None)), "table_invalid"),
    "another version": (table(with_metadata(format_version="2")), "table_invalid"),
    "a null id": (table(cell("id", 0, None)), "table_invalid"),
    "an empty id": (table(cell("id", 2, "")), "table_invalid"),
    "a token id below 0": (table(cell("token_ids", 2, [4, -(2**31)])), "table_invalid"),
    "a null row": (table(cell("row", 0, None)), "table_invalid"),
    "two batches": (two_batches, "table_invalid"),
    "no batch": (no_batch, "table_invalid"),
    "compressed with LZ4": (table(lambda b: b, compression="lz4"), "table_invalid"),
    "compressed with Zstandard": (table(lambda b: b, compression="zstd"), "table_invalid"),
    "a gigabyte in a few kilobytes": (bomb, "table_invalid"),
    "a terabyte that is not there": (lying_bomb, "table_invalid"),
    "a buffer of a terabyte": (huge_buffer, "table_invalid"),
    "2^40 values": (huge_length, "table_invalid"),
    "minus one value": (negative_length, "table_invalid"),
    "no footer": (lambda data: data[:-10], "table_invalid"),
    "a footer of another length": (
        lambda data: data[:-10] + b"\xff\xff\xff\x7f" + data[-6:],
        "table_invalid",
    ),
    "a row less": (table(lambda b: b.slice(0, 2)), CONTRADICTS),
    "no row": (table(lambda b: b.slice(0, 0)), CONTRADICTS),
    "another row number": (table(cell("row", 0, 7)), CONTRADICTS),
    "a negative row number": (table(cell("row", 0, -1)), CONTRADICTS),
    "failed and ok": (table(cell("status", 1, "ok")), CONTRADICTS),
    "no reason": (table(cell("failure", 1, None)), CONTRADICTS),
    "an offset that overlaps": (table(cell("offset", 2, 0)), CONTRADICTS),
    "an offset beyond the file": (table(cell("offset", 2, 1 << 40)), CONTRADICTS),
    "a negative offset": (table(cell("offset", 0, -1)), CONTRADICTS),
    "an offset of a failed row": (table(cell("offset", 1, 1)), CONTRADICTS),
    "no offset": (table(cell("offset", 0, None)), CONTRADICTS),
    "a length of zero": (table(cell("length", 0, 0)), CONTRADICTS),
    "a negative length": (table(cell("length", 0, -1)), CONTRADICTS),
    "a length beyond the file": (table(cell("length", 2, 2)), CONTRADICTS),
    "lengths whose sum is right": (
        table(values_changed("length", lambda _: [2**63 - 1, 0, 3 - 2**63])),
        CONTRADICTS,
    ),
    "no token ids": (table(cell("token_ids", 0, None)), CONTRADICTS),
    "no token digest": (table(cell("token_sha256", 0, None)), CONTRADICTS),
}
ARROW = {
    "not Arrow": (lambda data: b"\x80" * len(data), "array_invalid"),
    "a stream": (as_stream, "array_invalid"),
    "another name": (table(lambda b: b.rename_columns(["x"])), "array_invalid"),
    "a column more": (table(lambda b: b.append_column("x", b.column(0))), "array_invalid"),
    "other sites": (table(with_metadata(sites='["embed"]')), "array_invalid"),
    "another dtype": (table(with_metadata(dtype="bfloat16")), "array_invalid"),
    "another version": (table(with_metadata(format_version="2")), "array_invalid"),
    "two batches": (two_batches, "array_invalid"),
    "no batch": (no_batch, "array_invalid"),
    "a row less": (table(lambda b: b.slice(0, 1)), "array_invalid"),
    "a row more": (table(lambda b: pa.concat_batches([b, b])), "array_invalid"),
    "compressed": (table(lambda b: b, compression="zstd"), "array_invalid"),
    "a terabyte that is not there": (lying_bomb, "array_invalid"),
    "a buffer of a terabyte": (huge_buffer, "array_invalid"),
    "2^40 values": (huge_length, "array_invalid"),
    "minus one value": (negative_length, "array_invalid"),
    "no footer": (lambda data: data[:-10], "array_invalid"),
    "doubles": (
        table(retyped("features", pa.list_(pa.list_(pa.float64(), 4), 1))),
        "array_invalid",
    ),
    "NaN": (
        table(values_changed("features", lambda v: [[[float("nan"), *v[0][0][1:]]], *v[1:]])),
        "values_not_finite",
    ),
    "a null": (
        table(values_changed("features", lambda v: [[[None, *v[0][0][1:]]], *v[1:]])),
        "array_invalid",
    ),
}
TRACES = {
    "not Arrow": (lambda data: b"\x80" * len(data), "table_invalid"),
    "a stream": (as_stream, "table_invalid"),
    "a column less": (table(lambda b: b.drop_columns(["L2_mlp_out"])), "table_invalid"),
    "other sites": (table(with_metadata(sites='["embed"]')), "table_invalid"),
    "two batches": (two_batches, "table_invalid"),
    "compressed": (table(lambda b: b, compression="zstd"), "table_invalid"),
    "a terabyte that is not there": (lying_bomb, "table_invalid"),
    "a buffer of a terabyte": (huge_buffer, "table_invalid"),
    "2^40 values": (huge_length, "table_invalid"),
    "a row less": (table(lambda b: b.slice(0, 1)), CONTRADICTS),
    "another row": (table(cell("row", 0, 1)), CONTRADICTS),
    "another id": (table(cell("id", 0, "x")), CONTRADICTS),
    "other tokens": (table(cell("token_ids", 0, [9, 9])), CONTRADICTS),
    "a token more": (
        table(values_changed("L2_mlp_out", lambda v: [[*v[0], v[0][0]], *v[1:]])),
        CONTRADICTS,
    ),
    "NaN": (
        table(values_changed("L2_mlp_out", lambda v: [[[float("nan")] * 3, *v[0][1:]], *v[1:]])),
        CONTRADICTS,
    ),
}
TEXTS_OF_ROWS = {
    "a failure of no code": (table(cell("failure", 1, "{}")), "table_invalid"),
    "a failure that is pickled": (table(cell("failure", 1, "cos\nsystem\n")), "table_invalid"),
    "a failure with blanks": (
        table(cell("failure", 1, failure().replace(",", ", "))),
        "table_invalid",
    ),
    "a failure whose keys are not sorted": (
        table(cell("failure", 1, unsorted(failure()))),
        "table_invalid",
    ),
    "a failure that may pass": (table(cell("failure", 1, failure(permanent=False))), CONTRADICTS),
    "metadata that are not JSON": (table(cell("metadata", 0, "{")), "table_invalid"),
    "metadata with a key twice": (table(cell("metadata", 0, '{"a":1,"a":2}')), "table_invalid"),
    "metadata of 100,000 digits": (
        table(cell("metadata", 0, f'{{"a":{"9" * 100_000}}}')),
        "table_invalid",
    ),
    "metadata of 100,000 brackets": (table(cell("metadata", 0, "[" * 100_000)), "table_invalid"),
}
# What only a look at every row, or at all files together, tells.
DEEP = {
    "other tokens": (table(cell("token_ids", 0, [9, 9])), "digest_mismatch"),
    "another request": (table(cell("request_sha256", 0, b"\0" * 32)), "digest_mismatch"),
    "another status": (table(cell("status", 1, "poisonous")), "digest_mismatch"),
    "a failure of another code": (
        table(cell("failure", 1, failure(code="poisonous", stage="capture"))),
        "digest_mismatch",
    ),
    "an id twice": (table(cell("id", 2, "r-0")), CONTRADICTS),
    "metadata that are a list": (table(cell("metadata", 0, "[]")), "table_invalid"),
    "metadata of 500 brackets": (
        table(cell("metadata", 0, f'{{"a":{"[" * 500}{"]" * 500}}}')),
        "table_invalid",
    ),
}

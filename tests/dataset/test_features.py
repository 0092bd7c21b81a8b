"""Features files against bytes made by hand, by NumPy and by Arrow, and every way they can lie."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import struct

import numpy as np
import pyarrow as pa
import pytest
from dataset_builders import make_rows, make_spec

from wllm_ray.dataset.format.dtypes import all_finite, is_exact, narrow, resolve_dtype, widen
from wllm_ray.dataset.format.features import (
    decode_features,
    encode_features,
    npy_header,
    sha256_and_finite,
)
from wllm_ray.errors import IntegrityError, NotOfferedError

pytestmark = pytest.mark.requirement("D-1")

SITES = ("embed", "L1_mlp_out")
WIDTH = 4
DTYPES = ("float32", "bfloat16", "float16")
DESCR = {"float32": "<f4", "bfloat16": "<u2", "float16": "<f2"}
ARROW = {"float32": pa.float32(), "bfloat16": pa.uint16(), "float16": pa.float16()}
LAYOUTS = ("stacked", "per_site")


def asked(shard_format="npy", dtype="float32", layout="stacked"):
    return make_spec(
        make_rows(1),
        sites=SITES,
        dtype=dtype,
        storage_dtype="native",
        shard_format=shard_format,
        shard_layout=layout,
    )


def values(rows, axes):
    """Values that every dtype holds exactly."""
    count = rows * int(np.prod(axes))
    return (np.arange(count, dtype=np.float32) % 100 / 4 - 7).reshape(rows, *axes)


def file_of(spec, stored, cuts=()):
    blocks = np.split(stored, cuts)
    return b"".join(bytes(p) for p in encode_features(spec, spec.arrays[0], blocks, len(stored)))


def decoded(spec, data, rows):
    return decode_features(spec, spec.arrays[0], np.frombuffer(data, np.uint8), rows, "x")


# --- the bytes --------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 1, 4), (3, 1, 4), (123_456, 62, 8192), (0, 4), (3, 4)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_header_is_the_one_of_the_page_and_of_numpy(shape, dtype):
    by_hand = b"\x93NUMPY\x01\x00" + struct.pack("<H", 118)
    by_hand += f"{{'descr': '{DESCR[dtype]}', 'fortran_order': False, 'shape': {shape}, }}".encode()
    by_hand = by_hand.ljust(127) + b"\n"
    by_numpy = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        by_numpy, {"descr": DESCR[dtype], "fortran_order": False, "shape": shape}
    )
    assert npy_header(shape, dtype) == by_hand == by_numpy.getvalue()


@pytest.mark.parametrize(
    ("shard_format", "dtype", "layout"), list(itertools.product(("npy", "arrow"), DTYPES, LAYOUTS))
)
@pytest.mark.parametrize("rows", [0, 1, 7, 3000])
def test_what_is_written_is_read_without_a_copy_however_it_was_cut(
    shard_format, dtype, layout, rows
):
    spec = asked(shard_format, dtype, layout)
    stored = narrow(values(rows, spec.arrays[0].axes), dtype)
    data = file_of(spec, stored)
    assert data == file_of(spec, stored, cuts=sorted((min(1, rows), rows // 2)))
    raw = np.frombuffer(data, np.uint8)
    found = decode_features(spec, spec.arrays[0], raw, rows, "x")
    assert found.dtype == np.dtype(DESCR[dtype])
    assert np.array_equal(found, stored)
    assert rows == 0 or np.shares_memory(found, raw)
    assert np.array_equal(widen(found, dtype), values(rows, spec.arrays[0].axes))


@pytest.mark.parametrize(("dtype", "layout"), list(itertools.product(DTYPES, LAYOUTS)))
@pytest.mark.parametrize("rows", [0, 5])
def test_an_arrow_file_is_the_one_that_arrow_itself_writes(dtype, layout, rows):
    spec = asked("arrow", dtype, layout)
    stored = narrow(values(rows, spec.arrays[0].axes), dtype)
    column = pa.FixedSizeListArray.from_arrays(
        pa.array(stored.reshape(-1), ARROW[dtype]),
        type=pa.list_(pa.field("item", ARROW[dtype], nullable=False), WIDTH),
    )
    names = ["embed"]
    if layout == "stacked":
        outer = pa.list_(pa.field("item", column.type, nullable=False), 2)
        column, names = pa.FixedSizeListArray.from_arrays(column, type=outer), list(SITES)
    metadata = {
        "format": "wllm_ray.features",
        "format_version": "1",
        "dtype": dtype,
        "sites": json.dumps(names, separators=(",", ":")),
    }
    name = "features" if layout == "stacked" else "embed"
    schema = pa.schema([pa.field(name, column.type, nullable=False)], metadata=metadata)
    by_arrow = io.BytesIO()
    with pa.ipc.new_file(by_arrow, schema) as writer:
        writer.write_batch(pa.record_batch([column], schema=schema))
    assert file_of(spec, stored) == by_arrow.getvalue()


def test_a_npy_file_of_numpys_is_read_and_the_other_way_round():
    spec = asked()
    array = values(3, (2, WIDTH))
    file = io.BytesIO()
    np.save(file, array)
    assert np.array_equal(decoded(spec, file.getvalue(), 3), array)
    ours = file_of(spec, array)
    assert np.array_equal(np.load(io.BytesIO(ours), allow_pickle=False), array)


# --- dtypes -----------------------------------------------------------------------------------


@pytest.mark.requirement("C-10")
def test_bfloat16_is_the_upper_half_of_a_float32():
    halves = np.arange(1 << 16, dtype=np.uint32)
    exact = (halves << 16).view(np.float32)
    finite = np.isfinite(exact)
    assert np.array_equal(narrow(exact, "bfloat16"), halves.astype(np.uint16))
    assert np.array_equal(widen(halves.astype(np.uint16), "bfloat16").view(np.uint32), halves << 16)
    assert is_exact(exact, narrow(exact, "bfloat16"), "bfloat16")
    rounded = np.nextafter(exact[finite][5:6], np.float32(np.inf))
    assert not is_exact(rounded, narrow(rounded, "bfloat16"), "bfloat16")
    for bits, good in zip(halves.astype(np.uint16), finite, strict=True):
        if bits % 97 == 0 or not good:
            assert all_finite(np.array([bits]), "bfloat16") == good


@pytest.mark.requirement("C-10")
def test_float16_is_rounded_to_nearest_even_and_every_one_is_widened_exactly():
    every = np.arange(1 << 16, dtype=np.uint32).astype(np.uint16).view(np.float16)
    every = every[np.isfinite(every)]
    wide = widen(every, "float16")
    assert [float(one) for one in wide] == [float(one) for one in every]
    assert narrow(np.float32([2049, 2051, 65519.0, 65520.0, 1e-9]), "float16").tolist() == [
        2048.0,
        2052.0,
        65504.0,
        np.inf,
        0.0,
    ]


@pytest.mark.requirement("C-10")
@pytest.mark.parametrize(
    ("storage_dtype", "engine_dtype", "position", "expected"),
    [
        ("float32", "bfloat16", "last_prompt", "float32"),
        ("float16", "bfloat16", "last_prompt", "float16"),
        ("native", "bfloat16", "all_prompt", "bfloat16"),
        ("native", "float16", "index:0", "float16"),
        ("native", "float32", "first", "float32"),
        # The mean is taken in float32, whatever it is taken of.
        ("native", "bfloat16", "mean_prompt", "float32"),
    ],
)
def test_native_is_what_the_value_was_computed_in(storage_dtype, engine_dtype, position, expected):
    assert resolve_dtype(storage_dtype, engine_dtype, position) == expected


@pytest.mark.requirement("C-10", "C-17")
def test_an_engine_dtype_that_is_not_stored_is_refused():
    with pytest.raises(NotOfferedError, match=r"`native` would be float8 here.*ask for `float32`"):
        resolve_dtype("native", "float8", "first")


# --- lies -------------------------------------------------------------------------------------


def saved(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


GOOD = saved(np.ones((2, 2, WIDTH), "<f4"))
LIES = {
    "truncated": (GOOD[:-1], "size_mismatch"),
    "longer": (GOOD + b"\0", "size_mismatch"),
    "empty": (b"", "size_mismatch"),
    "other shape": (saved(np.ones((1, 4, WIDTH), "<f4")), "array_invalid"),
    "integers": (saved(np.ones((2, 2, WIDTH), "<i4")), "array_invalid"),
    "big-endian": (saved(np.ones((2, 2, WIDTH), ">f4")), "array_invalid"),
    # NumPy calls an array of this shape C order; the header is written by hand.
    "fortran order": (GOOD.replace(b"False", b"True ", 1), "array_invalid"),
    "doubles": (saved(np.ones((2, 1, WIDTH), "<f8")), "array_invalid"),
    "version 2": (GOOD.replace(b"\x01\x00", b"\x02\x00", 1), "array_invalid"),
    "objects": (
        GOOD[:10] + GOOD[10:128].replace(b"'<f4'", b"'|O' ") + GOOD[128:],
        "array_invalid",
    ),
}


@pytest.mark.requirement("D-6")
@pytest.mark.parametrize("lie", LIES)
def test_each_way_a_npy_file_can_lie(lie):
    data, code = LIES[lie]
    with pytest.raises(IntegrityError, match=r"^x: expected") as error:
        decoded(asked(), data, 2)
    assert error.value.code == code


def arrow_file(array, *, schema=None, batches=1, options=None):
    schema = schema or pa.schema([pa.field("features", array.type, nullable=False)])
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, schema, options=options) as writer:
        for _ in range(batches):
            writer.write_batch(pa.record_batch([array], schema=schema))
    return sink.getvalue()


def arrow_lies():
    spec = asked("arrow")
    good = file_of(spec, np.ones((2, 2, WIDTH), np.float32))
    column = pa.ipc.open_file(pa.py_buffer(good)).get_batch(0).column(0)
    schema = pa.ipc.open_file(pa.py_buffer(good)).schema
    doubles = pa.list_(pa.list_(pa.float64(), WIDTH), 2)
    with_null = pa.array([None, [[1.0] * WIDTH] * 2], column.type)
    return {
        "not arrow": b"\0" * len(good),
        "truncated": good[:-40],
        "no metadata": arrow_file(column, schema=schema.remove_metadata()),
        "other sites": arrow_file(
            column, schema=schema.with_metadata({**schema.metadata, b"sites": b'["embed"]'})
        ),
        "another name": arrow_file(column, schema=schema.set(0, schema.field(0).with_name("x"))),
        "two batches": arrow_file(column, schema=schema, batches=2),
        "no batch": arrow_file(column, schema=schema, batches=0),
        "more rows": arrow_file(pa.concat_arrays([column, column]), schema=schema),
        "doubles": arrow_file(column.cast(doubles)),
        "a null": arrow_file(with_null, schema=schema.set(0, schema.field(0).with_nullable(True))),
        "a null that the schema denies": arrow_file(with_null, schema=schema),
        "compressed": arrow_file(
            pa.array([[[1.0] * WIDTH] * 2] * 2, column.type),
            schema=schema,
            options=pa.ipc.IpcWriteOptions(compression="lz4"),
        ),
    }


@pytest.mark.requirement("D-6")
@pytest.mark.parametrize("lie", arrow_lies())
def test_each_way_an_arrow_file_can_lie(lie):
    data = arrow_lies()[lie] + b"\0" * 2000 * (lie == "truncated")
    with pytest.raises(IntegrityError, match=r"^x: expected an Arrow IPC file") as error:
        decoded(asked("arrow"), data, 2)
    assert error.value.code == "array_invalid"


@pytest.mark.requirement("D-6")
@pytest.mark.parametrize("shard_format", ["npy", "arrow"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("place", [0, 170_000, 399_999])
def test_a_value_that_is_not_finite_is_found_wherever_it_is(shard_format, dtype, place):
    spec = asked(shard_format, dtype)
    wide = np.ones((50_000, 2, WIDTH), np.float32)  # several blocks of the reader
    for bad in (1.0, np.inf, -np.inf, np.nan):
        wide.reshape(-1)[place] = bad
        data = file_of(spec, narrow(wide, dtype))
        raw = np.frombuffer(data, np.uint8)
        found = sha256_and_finite(raw, decoded(spec, data, 50_000), dtype)
        assert found == (hashlib.sha256(data).hexdigest(), bad == 1.0)

"""Every way that we know in which a dataset can lie, each with the code that refuses it.

A :class:`Lie` damages a copy of a good dataset and says when it must be found out: ``open`` by
loading, ``access`` by the first use of what was damaged, ``verify`` by nothing less.
"""

from __future__ import annotations

import io
import json
import os
import pickle
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from forging import arrow_file, batch_of, cell, flipped, pair, replaced, table

from wllm_ray.dataset.manifest import TraceSpec
from wllm_ray.digest import canonical_json

SITES = ("embed", "L1_attn_out_prelinear")
PER_SITE = {"sites": SITES, "site_widths": (4, 6), "position": "all_prompt"}
TRACE = TraceSpec(sites=(*SITES, "L2_mlp_out"), site_widths=(4, 6, 3))
# What the lies are told about: options of `dataset_builders.make_spec`.
BASES = {
    "npy": {},
    "arrow": {"shard_format": "arrow"},
    "sites": PER_SITE,
    "traces": PER_SITE | {"trace": TRACE, "shard_format": "arrow"},
}


@dataclass(frozen=True)
class Lie:
    """One way to lie.

    Attributes:
        tell: Damages a :class:`forging.Forgery`.
        code: Of the error that refuses it.
        stage: When it is found out, where nobody asked for more.
        base: Which of :data:`BASES` it is told about.
    """

    tell: object = field(repr=False)
    code: str
    stage: str
    base: str = "npy"


# --- documents ------------------------------------------------------------------------------------


def text(change):
    """Change the manifest's bytes."""

    def tell(forgery):
        path = forgery.folder / "manifest.json"
        path.write_bytes(change(path.read_bytes()))

    return tell


def unsealed(change):
    """Change the manifest and leave its digest as it was, in canonical form."""

    def tell(forgery):
        change(forgery.manifest)
        (forgery.folder / "manifest.json").write_bytes(canonical_json(forgery.manifest))

    return tell


def sealed(change):
    """Change the manifest and everything from which it would come."""

    def tell(forgery):
        change(forgery.manifest)
        forgery.seal()

    return tell


def at(*path, to):
    """Change one value of the manifest."""

    def change(document):
        *parents, last = path
        for key in parents:
            document = document[key]
        document[last] = to

    return change


def without(*path):
    def change(document):
        *parents, last = path
        for key in parents:
            document = document[key]
        del document[last]

    return change


def of_rows(count):
    """A shard of so many feature rows, in every place that says so."""

    def change(document):
        size = 128 + 16 * count
        document["shards"][0]["feature_rows"] = count
        document["shards"][0]["files"][0] |= {"shape": [count, 1, 4], "bytes": size}
        document["shape"][0] = count + 2

    return change


def twice(data):
    return data.replace(b'"rows":', b'"rows":5,"rows":', 1)


TEXTS = {
    "nothing": (lambda _: b"", "manifest_invalid"),
    "cut off": (lambda data: data[:-1], "manifest_invalid"),
    "half": (lambda data: data[: len(data) // 2], "manifest_invalid"),
    "a line break at the end": (lambda data: data + b"\n", "manifest_invalid"),
    "a zero byte at the end": (lambda data: data + b"\0", "manifest_invalid"),
    "two documents": (lambda data: data + data, "manifest_invalid"),
    "a byte order mark": (lambda data: b"\xef\xbb\xbf" + data, "manifest_invalid"),
    "not UTF-8": (replaced(b'"tiny"', b'"t\xffny"'), "manifest_invalid"),
    "UTF-16": (lambda data: data.decode().encode("utf-16"), "manifest_invalid"),
    "a key twice": (twice, "manifest_invalid"),
    "NaN": (replaced(b'"measured_relative_l2":0.0', b'"measured_relative_l2":NaN'), None),
    "infinity": (replaced(b'"measured_relative_l2":0.0', b'"measured_relative_l2":Infinity'), None),
    "a number beyond a double": (
        replaced(b'"measured_relative_l2":0.0', b'"measured_relative_l2":1e999'),
        "manifest_invalid",
    ),
    "100,000 digits": (replaced(b'"rows_ok":4', b'"rows_ok":' + b"9" * 100_000), None),
    "60,000 digits": (replaced(b'"rows_ok":4', b'"rows_ok":' + b"9" * 60_000), None),
    "a version of 60,000 digits": (
        replaced(b'"format_version":1', b'"format_version":' + b"9" * 60_000),
        "format_unknown",
    ),
    "a format of a million letters": (
        replaced(b'"wllm_ray.manifest"', b'"' + b"x" * 1_000_000 + b'"'),
        "format_unknown",
    ),
    "100,000 brackets": (lambda _: b"[" * 100_000, "manifest_invalid"),
    "100,000 objects": (lambda _: b'{"a":' * 100_000, "manifest_invalid"),
    "nested in a field": (
        replaced(b'"rows_ok":4', b'"rows_ok":' + b"[" * 500 + b"]" * 500),
        "manifest_invalid",
    ),
    "a list": (lambda data: b"[" + data + b"]", "manifest_invalid"),
    "null": (lambda _: b"null", "manifest_invalid"),
    "blanks": (lambda data: json.dumps(json.loads(data)).encode(), "manifest_invalid"),
    "another order": (
        lambda data: json.dumps(
            dict(reversed(json.loads(data).items())), separators=(",", ":")
        ).encode(),
        "manifest_invalid",
    ),
    "an escape too many": (replaced(b'"tiny"', b'"t\\u0069ny"'), "manifest_invalid"),
    "a number in another form": (
        replaced(b'"measured_relative_l2":0.0', b'"measured_relative_l2":0.00'),
        "manifest_invalid",
    ),
    "minus zero": (replaced(b'"recaptured":0', b'"recaptured":-0'), "manifest_invalid"),
    "pickled": (lambda data: pickle.dumps(json.loads(data)), "manifest_invalid"),
}

INVALID = "manifest_invalid"
CONTRADICTS = "rows_inconsistent"
FILES = ("shards", 0, "files")
SHA = "0" * 64

SEALED = {
    "an unknown version": (at("format_version", to=2), "format_unknown"),
    "a version that is true": (at("format_version", to=True), "format_unknown"),
    "a version that is a float": (at("format_version", to=1.0), "format_unknown"),
    "a version that is a list": (at("format_version", to=[1]), "format_unknown"),
    "another format": (at("format", to="wllm_ray.spec"), "format_unknown"),
    "an unknown key": (at("comment", to="x"), INVALID),
    "a missing key": (without("capture_mode"), INVALID),
    "an unknown key of a shard": (at("shards", 0, "comment", to="x"), INVALID),
    "an unknown key of a file": (at(*FILES, 0, "url", to="x"), INVALID),
    "a missing key of a file": (without(*FILES, 0, "bytes"), INVALID),
    "rows as true": (at("shards", 1, "rows", to=True), INVALID),
    "rows as text": (at("rows", to="5"), INVALID),
    "rows as a float": (at("rows", to=5.0), INVALID),
    "rows as null": (at("rows", to=None), INVALID),
    "a negative count": (at("shards", 0, "rows_failed", to=-1), INVALID),
    "negative bytes": (at(*FILES, 1, "bytes", to=-1), INVALID),
    "no row": (at("rows", to=0), INVALID),
    "a row too many": (at("rows", to=6), CONTRADICTS),
    "a good row too many": (at("rows_ok", to=5), CONTRADICTS),
    "a failure less": (at("rows_failed", to=0), CONTRADICTS),
    "a failure less in a shard": (at("shards", 0, "rows_failed", to=0), CONTRADICTS),
    "more failures than rows": (at("shards", 0, "rows_failed", to=4), CONTRADICTS),
    "another shape": (at("shape", to=[5, 1, 4]), CONTRADICTS),
    "a negative shape": (at("shape", to=[-4, 1, 4]), INVALID),
    "a shape of two axes": (at("shape", to=[4, 4]), INVALID),
    "other axes": (at("axes", to=["site", "row", "hidden"]), INVALID),
    "a shard that overlaps": (at("shards", 1, "first_row", to=2), INVALID),
    "a shard after a gap": (at("shards", 1, "first_row", to=4), INVALID),
    "a shard far away": (at("shards", 1, "first_row", to=10**30), INVALID),
    "a negative first row": (at("shards", 0, "first_row", to=-1), INVALID),
    "a shard twice": (at("shards", 1, "shard", to=0), CONTRADICTS),
    "shards in another order": (lambda m: m["shards"].reverse(), CONTRADICTS),
    "no shard": (at("shards", to=[]), CONTRADICTS),
    "a shard over its limit": (at("max_rows_per_shard", to=2), INVALID),
    "more feature rows": (at("shards", 0, "feature_rows", to=3), CONTRADICTS),
    "10^30 feature rows": (at("shards", 0, "feature_rows", to=10**30), INVALID),
    "2^63 feature rows": (of_rows(2**63), INVALID),
    "feature rows of 4,300 digits": (of_rows(10**4299), INVALID),
    "rows of 4,300 digits": (
        lambda m: [shard.update(rows=9 * 10**4299) for shard in m["shards"]],
        INVALID,
    ),
    "rows that add up to 2^70": (
        lambda m: (at("shards", 1, "rows", to=2**70)(m), at("rows", to=2**70 + 3)(m)),
        INVALID,
    ),
    "a file twice": (lambda m: m["shards"][0]["files"].append(m["shards"][0]["files"][0]), INVALID),
    "files in another order": (lambda m: m["shards"][0]["files"].reverse(), INVALID),
    "no rows table": (without(*FILES, 1), INVALID),
    "no files": (at(*FILES, to=[]), INVALID),
    "an unknown role": (at(*FILES, 0, "role", to="code"), INVALID),
    "a site where there is none": (at(*FILES, 0, "site", to="L1_resid_post"), INVALID),
    "a shape of the rows table": (at(*FILES, 1, "shape", to=[3]), CONTRADICTS),
    "a dtype of the rows table": (at(*FILES, 1, "dtype", to="<f4"), CONTRADICTS),
    "pickled objects": (at(*FILES, 0, "dtype", to="|O"), "array_invalid"),
    "big-endian": (at(*FILES, 0, "dtype", to=">f4"), "array_invalid"),
    "doubles": (at(*FILES, 0, "dtype", to="<f8"), "array_invalid"),
    "a shape with a zero": (at(*FILES, 0, "shape", to=[0, 1, 4]), "array_invalid"),
    "a shape of the same size": (at(*FILES, 0, "shape", to=[1, 2, 4]), "array_invalid"),
    "a shape of the whole address space": (at(*FILES, 0, "shape", to=[2**62] * 3), "array_invalid"),
    "features of no size": (at(*FILES, 0, "bytes", to=0), "size_mismatch"),
    "features of another size": (at(*FILES, 0, "bytes", to=161), "size_mismatch"),
    "a digest in capitals": (at(*FILES, 0, "sha256", to="A" * 64), INVALID),
    "a digest and a line break": (at(*FILES, 0, "sha256", to="a" * 64 + "\n"), INVALID),
    "a short digest": (at(*FILES, 0, "sha256", to="a" * 63), INVALID),
    "another storage dtype": (at("storage_dtype", to="float64"), INVALID),
    "another stored dtype": (at("dtype", to="float16"), INVALID),
    "bfloat16 of an engine in float32": (
        lambda m: m.update(storage_dtype="native", dtype="bfloat16"),
        CONTRADICTS,
    ),
    "another format of shards": (at("shard_format", to="pickle"), INVALID),
    "another layout": (at("shard_layout", to="per_site"), INVALID),
    "a site twice": (
        lambda m: m.update(sites=["L1_resid_post"] * 2, site_widths=[4, 4]),
        INVALID,
    ),
    "a site of a million letters": (at("sites", to=["x" * 1_000_000]), INVALID),
    "a key of a million letters": (at("x" * 1_000_000, to=1), INVALID),
    "an alias": (at("sites", to=["blocks.1.hook_resid_post"]), INVALID),
    "an unknown site": (at("sites", to=["L1_soul"]), INVALID),
    "a site that is a path": (at("sites", to=["../../etc"]), INVALID),
    "no site": (at("sites", to=[]), INVALID),
    "widths of other sites": (at("site_widths", to=[4, 4]), INVALID),
    "a width of zero": (at("site_widths", to=[0]), INVALID),
    "an unknown position": (at("position", to="middle"), INVALID),
    "a position in another form": (at("position", to="last-prompt"), INVALID),
    "a position of 10^9 indices": (at("position", to="index:" + "1," * 50_000 + "2"), INVALID),
    "another class": (at("reproducibility", to="tolerance"), CONTRADICTS),
    "mixed without being so": (at("reproducibility", to="mixed"), CONTRADICTS),
    "a bound beyond a double": (at("measured_relative_l2", to=10**400), INVALID),
    "a bound of a self-test beyond a double": (
        at("selftest", "measured_relative_l2", to=10**400),
        INVALID,
    ),
    "an unknown class": (at("reproducibility", to="exact"), INVALID),
    "an id that is a path": (at("dataset_id", to="../d"), INVALID),
    "an id and a line break": (at("dataset_id", to="d\n"), INVALID),
    "another id": (at("dataset_id", to="e"), CONTRADICTS),
    "a text with half a surrogate pair": (at("model", "name", to="\ud800"), INVALID),
}

NAMES = {
    "a parent folder": "../shard",
    "an absolute name": "/etc/passwd",
    "a subfolder": "x/shard",
    "a drive": "C:\\shard",
    "an address": "http://example.org/shard",
    "nothing": "",
    "a dot": ".",
    "a zero byte": "shard\0",
    "a blank that nobody sees": "shard-00000-\u200b",
    "full-width digits": "shard-\uff10\uff100000-",
    "text from right to left": "shard-\u202e",
    "capitals": "SHARD",
    "the manifest": "manifest.json",
    "a million letters": "x" * 1_000_000,
}


def named(name):
    """Call a features file otherwise, and put one there where that can be."""

    def tell(forgery):
        entry = forgery.entry("features")
        entry["name"] = f"{name}{entry['name']}" if name.endswith("shard") else name
        forgery.seal()

    return tell


def of_shard(forgery):
    """The digest of the file is right, the number of its shard is not."""
    entry = forgery.entry("features")
    entry["name"] = entry["name"].replace("shard-00000", "shard-00001")
    forgery.seal()


def in_short(forgery):
    """Shard numbers have five digits."""
    entry = forgery.entry("features")
    entry["name"] = entry["name"].replace("shard-00000", "shard-0")
    forgery.seal()


DOCUMENTS = {
    **{f"manifest: {n}": Lie(text(f), c or INVALID, "open") for n, (f, c) in TEXTS.items()},
    **{f"sealed: {n}": Lie(sealed(f), c, "open") for n, (f, c) in SEALED.items()},
    **{f"named: {n}": Lie(named(v), "name_invalid", "open") for n, v in NAMES.items()},
    "named: another shard": Lie(of_shard, "name_invalid", "open"),
    "named: a short number": Lie(in_short, "name_invalid", "open"),
    "unsealed: another model": Lie(
        unsealed(at("model", "name", to="x")), "digest_mismatch", "open"
    ),
    "unsealed: another content": Lie(
        unsealed(at("content_sha256", to=SHA)), "digest_mismatch", "open"
    ),
    "unsealed: sites in another order": Lie(
        unsealed(lambda m: m["sites"].reverse()), "digest_mismatch", "open", "sites"
    ),
    "sealed: sites in another order": Lie(
        sealed(lambda m: (m["sites"].reverse(), m["site_widths"].reverse())),
        "manifest_invalid",
        "open",
        "sites",
    ),
    "sealed: a traced site of another width": Lie(
        sealed(at("trace", "site_widths", to=[5, 6, 3])), INVALID, "open", "traces"
    ),
    "sealed: a trace that nobody asked for": Lie(
        sealed(at("trace", to=None)), INVALID, "open", "traces"
    ),
}


# --- what lies in the folder ----------------------------------------------------------------------


def on_path(role, do):
    return lambda forgery: do(forgery.path(role))


def remade(make):
    """Put something else in the file's place."""

    def do(path):
        path.unlink()
        make(path)

    return do


def linked_outside(path):
    outside = path.parents[3] / f"outside-{path.name}"
    path.rename(outside)
    path.symlink_to(outside)


def folder_outside(forgery):
    outside = forgery.folder.parents[2] / "outside"
    forgery.folder.rename(outside)
    forgery.folder.symlink_to(outside)


def exchanged(role, first, second):
    """Exchange the contents of two files of a role: (shard, number)."""

    def tell(forgery):
        paths = [forgery.path(role, *one) for one in (first, second)]
        contents = [path.read_bytes() for path in paths]
        for path, data in zip(paths, contents[::-1], strict=True):
            path.write_bytes(data)
        forgery.damaged = paths[0]

    return tell


def documents_exchanged(forgery):
    one, two = (forgery.folder / f"shard-0000{n}.receipt.json" for n in (0, 1))
    data = one.read_bytes()
    one.write_bytes(two.read_bytes())
    two.write_bytes(data)
    forgery.damaged = one


def document(name, do):
    def tell(forgery):
        forgery.damaged = forgery.folder / name
        do(forgery.damaged)

    return tell


def rewritten(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


def of_another_capture(data):
    """The same rows, sites, shape and size, and other values."""
    return data[:128] + (np.frombuffer(data[128:], "<f4") * 2).tobytes()


def flip_value(data):
    return flipped(data.index(np.float32(1000).tobytes()))(data)


SPEC, RECEIPT = "spec.json", "shard-00000.receipt.json"
IN_PLACE = {
    "missing": (lambda path: path.unlink(), "file_missing"),
    "renamed": (lambda path: path.rename(path.with_name(f"{path.name}~")), "file_missing"),
    "a folder": (remade(os.mkdir), "file_missing"),
    "a pipe": (remade(os.mkfifo), "file_missing"),
    "a link to nowhere": (remade(lambda path: path.symlink_to("nowhere")), "file_missing"),
    "a link to itself": (remade(lambda path: path.symlink_to(path.name)), "file_missing"),
    "a link out of the root": (linked_outside, "name_invalid"),
    "empty": (rewritten(lambda _: b""), "size_mismatch"),
    "cut off": (rewritten(lambda data: data[:-1]), "size_mismatch"),
    "half": (rewritten(lambda data: data[: len(data) // 2]), "size_mismatch"),
    "longer": (rewritten(lambda data: data + b"\0"), "size_mismatch"),
    "twice": (rewritten(lambda data: data * 2), "size_mismatch"),
}
FOLDER = {
    **{
        f"{role}, {base}: {name}": Lie(on_path(role, do), code, "open", base)
        for base, role in (
            ("npy", "features"),
            ("npy", "rows"),
            ("arrow", "features"),
            ("traces", "trace"),
        )
        for name, (do, code) in IN_PLACE.items()
    },
    **{
        f"{name}: {how}": Lie(document(name, do), code, "verify")
        for name in (SPEC, RECEIPT)
        for how, do, code in (
            ("missing", lambda path: path.unlink(), "file_missing"),
            ("a folder", remade(os.mkdir), "file_missing"),
            ("a pipe", remade(os.mkfifo), "file_missing"),
            ("empty", rewritten(lambda _: b""), "digest_mismatch"),
            ("cut off", rewritten(lambda data: data[:-1]), "digest_mismatch"),
            ("flipped", rewritten(flipped(0.5)), "digest_mismatch"),
            ("longer", rewritten(lambda data: data + b"\n"), "digest_mismatch"),
            ("of another spec", rewritten(replaced(b'"rows":', b'"rowz":')), "digest_mismatch"),
        )
    },
    "receipts exchanged": Lie(documents_exchanged, "digest_mismatch", "verify"),
    "the folder is a link out of the root": Lie(folder_outside, "name_invalid", "open"),
    "files of two sites exchanged": Lie(
        exchanged("features", (0, 0), (0, 1)), "size_mismatch", "open", "sites"
    ),
    "features of another capture": Lie(
        lambda f: f.change("features", of_another_capture), "digest_mismatch", "access"
    ),
    "features, arrow: a bit of a value": Lie(
        lambda f: f.change("features", flip_value), "digest_mismatch", "access", "arrow"
    ),
    "features, npy: a bit of the magic": Lie(
        lambda f: f.change("features", flipped(1)), "array_invalid", "access"
    ),
    "features, npy: a bit of the dtype": Lie(
        lambda f: f.change("features", flipped(22)), "array_invalid", "access"
    ),
    "features, npy: a bit of the padding": Lie(
        lambda f: f.change("features", flipped(126)), "array_invalid", "access"
    ),
    **{
        f"{role}, {base}: a bit at {place}": Lie(
            lambda f, role=role, place=place: f.change(role, flipped(place)),
            "digest_mismatch",
            "access",
            base,
        )
        for base, role, places in (
            ("npy", "features", (128, 0.95, -1)),
            ("npy", "rows", (0, 9, 0.1, 0.3, 0.5, 0.7, 0.9, -1)),
            ("traces", "trace", (0, 9, 0.1, 0.5, 0.9, -1)),
        )
        for place in places
    },
}


# --- files that were forged -----------------------------------------------------------------------


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


def forged(role, change, *, by_name=True):
    """Forge a file; ``by_name`` says whether it will be found out, and not the manifest."""

    def tell(forgery):
        forgery.forge(role, change)
        forgery.seal()
        if not by_name:
            forgery.damaged = None

    return tell


def failure(**changes):
    text = {"code": "too_long", "message": "m", "permanent": True, "stage": "tokenize"} | changes
    return canonical_json(text).decode()


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


def manifest_alone(change):
    """Its own digests are right, and its receipts say something else."""

    def tell(forgery):
        change(forgery.manifest)
        forgery.seal_manifest()

    return tell


FORGED = {
    f"forged {role}, {base}: {name}": Lie(
        forged(role, change, by_name=code != SIZE),
        code or "array_invalid",
        "open" if code == SIZE else stage,
        base,
    )
    for role, base, stage, lies in (
        ("features", "npy", "access", NPY),
        ("rows", "npy", "access", ROWS),
        ("rows", "npy", "access", TEXTS_OF_ROWS),
        ("rows", "npy", "verify", DEEP),
        ("features", "arrow", "access", ARROW),
        ("trace", "traces", "access", TRACES),
    )
    for name, (change, code) in lies.items()
} | {
    "a vector of zeros": Lie(
        forged("features", lambda data: data[:-16] + bytes(16)), CONTRADICTS, "verify"
    ),
    "features that their traces do not give": Lie(
        forged("features", flip_value), CONTRADICTS, "verify", "traces"
    ),
    "versions that no receipt names": Lie(
        manifest_alone(at("versions", "numpy", to="9")), CONTRADICTS, "verify"
    ),
    "a self-test that no receipt names": Lie(
        manifest_alone(at("selftest", "passed", to=False)), CONTRADICTS, "verify"
    ),
}
LIES = DOCUMENTS | FOLDER | FORGED

# Those that promise more than there is.
HUGE = [
    name
    for name in LIES
    if any(word in name for word in ("terabyte", "gigabyte", "2^40", "address space", "digits"))
]

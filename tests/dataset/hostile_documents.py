"""Lies in the documents: manifests that are none, and manifests that contradict themselves."""

from __future__ import annotations

import json
import pickle

from forging import replaced
from hostile_lies import CONTRADICTS, INVALID, Lie

from wllm_ray.digest import canonical_json


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
    "sealed: a traced site of 2^31 components": Lie(
        sealed(at("trace", "site_widths", 2, to=2**31)), INVALID, "open", "traces"
    ),
    "sealed: a trace that nobody asked for": Lie(
        sealed(at("trace", to=None)), INVALID, "open", "traces"
    ),
}

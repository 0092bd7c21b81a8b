"""A committed dataset in the hands of somebody who wants to be believed.

:class:`Forgery` edits the documents and files of one dataset by hand. :meth:`Forgery.seal` makes
every digest right again, after FORMAT.md and not with the library's own builders, so that nothing
but the lie itself is left to be found.
"""

from __future__ import annotations

import hashlib
import json
import struct

import pyarrow as pa

from wllm_ray.digest import canonical_json

_SPEC_OF_CONTENT = (
    "dtype",
    "max_bytes_per_shard",
    "max_rows_per_shard",
    "position",
    "shard_format",
    "shard_layout",
    "sites",
    "storage_dtype",
)
_ONLY_OF_MANIFEST = (
    "axes",
    "content_sha256",
    "fingerprint",
    "manifest_sha256",
    "measured_relative_l2",
    "reproducibility",
    "rows_failed",
    "rows_ok",
    "selftest",
    "shape",
    "spec_sha256",
    "versions",
)
_MEASURED = (
    "shard",
    "first_row",
    "rows",
    "rows_failed",
    "feature_rows",
    "files",
    "rows_sha256",
    "recaptured",
    "timings",
)


def digest_of(value) -> str:
    data = value if isinstance(value, bytes) else canonical_json(value)
    return hashlib.sha256(data).hexdigest()


class Forgery:
    """A dataset's folder, and its manifest as a value to be changed.

    Attributes:
        folder: Where it lies.
        manifest: What :meth:`seal` will store.
        damaged: The last file that was asked for or forged.
    """

    def __init__(self, folder) -> None:
        self.folder = folder
        self.manifest = json.loads((folder / "manifest.json").read_bytes())
        self.damaged = None

    def entry(self, role, shard=0, number=0):
        """What the manifest says of the ``number``-th file of a role."""
        files = self.manifest["shards"][shard]["files"]
        return [one for one in files if one["role"] == role][number]

    def path(self, role, shard=0, number=0):
        self.damaged = self.folder / self.entry(role, shard, number)["name"]
        return self.damaged

    def change(self, role, change, shard=0, number=0) -> None:
        """Change a file and leave the records as they are."""
        path = self.path(role, shard, number)
        path.write_bytes(change(path.read_bytes()))

    def forge(self, role, change, shard=0, number=0) -> None:
        """Change a file, give it the name of its new content, and record that."""
        entry = self.entry(role, shard, number)
        data = change(self.path(role, shard, number).read_bytes())
        sha256 = digest_of(data)
        suffix = entry["name"].partition(".")[2]
        name = f"shard-{shard:05d}-{sha256[:16]}.{suffix}"
        entry.update(name=name, sha256=sha256, bytes=len(data))
        self.damaged = self.folder / name
        self.damaged.write_bytes(data)

    def seal(self) -> None:
        """Store the manifest, and the spec and the receipts from which it would come."""
        manifest = self.manifest
        spec = {key: value for key, value in manifest.items() if key not in _ONLY_OF_MANIFEST}
        spec["format"] = "wllm_ray.spec"
        names = ("first_row", "rows", "requests_sha256")
        spec["shards"] = [{name: shard[name] for name in names} for shard in manifest["shards"]]
        manifest["spec_sha256"] = self._store("spec.json", spec)
        for number, shard in enumerate(manifest["shards"]):
            name = f"shard-{number:05d}.receipt.json"
            receipt = json.loads((self.folder / name).read_bytes())
            receipt |= {key: shard[key] for key in _MEASURED}
            receipt["spec_sha256"] = manifest["spec_sha256"]
            shard["receipt_sha256"] = self._store(name, receipt)
        self.seal_manifest()

    def seal_manifest(self) -> None:
        """Store the manifest alone, its own digests made right."""
        manifest = self.manifest
        shards = [
            {
                "features_sha256": [e["sha256"] for e in shard["files"] if e["role"] == "features"],
                **{key: shard[key] for key in ("fingerprint", "first_row", "rows", "rows_sha256")},
            }
            for shard in manifest["shards"]
        ]
        content = {
            "fingerprint": manifest["fingerprint"],
            "format": "wllm_ray.content/1",
            "shards": shards,
            "spec": {name: manifest[name] for name in _SPEC_OF_CONTENT}
            | {f"{one}_revision": manifest[one]["revision"] for one in ("model", "tokenizer")},
        }
        manifest["content_sha256"] = digest_of(content)
        manifest.pop("manifest_sha256")
        manifest["manifest_sha256"] = digest_of(manifest)
        self._store("manifest.json", manifest)

    def _store(self, name, document) -> str:
        data = canonical_json(document)
        (self.folder / name).write_bytes(data)
        return digest_of(data)


# --- bytes ----------------------------------------------------------------------------------------


def flipped(at):
    """Change one bit of the byte at ``at``, counted as in an index, or at a share of the whole."""

    def change(data):
        place = at if isinstance(at, int) else int(at * len(data))
        out = bytearray(data)
        out[place] ^= 4
        return bytes(out)

    return change


def replaced(old, new):
    """Exchange some bytes that are there just once, or as often as may be for a shorter text."""

    def change(data):
        assert old in data, old
        return data.replace(old, new)

    return change


def pair(first, second):
    """How Arrow's metadata hold an offset and a length, or a length and a count of nulls."""
    return struct.pack("<qq", first, second)


# --- Arrow ----------------------------------------------------------------------------------------


def arrow_file(batches, schema=None, **options) -> bytes:
    batches = list(batches)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(
        sink, schema or batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)
    ) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def batch_of(data) -> pa.RecordBatch:
    return pa.ipc.open_file(data).get_batch(0)


def table(change, **options):
    """Decode an Arrow file, change its batch, and encode that."""
    return lambda data: arrow_file([change(batch_of(data))], **options)


def cell(column, row, value):
    """Change one value of a batch; the schema stays."""

    def change(batch):
        values = batch.column(column).to_pylist()
        values[row] = value
        number = batch.schema.get_field_index(column)
        field = batch.schema.field(number)
        return batch.set_column(number, field, pa.array(values, field.type))

    return change

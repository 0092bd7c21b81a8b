"""A committed dataset that was damaged or tampered with: each way is refused by name."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil

import numpy as np
import pyarrow as pa
import pytest
from dataset_builders import FAILED_ROW, make_rows, make_spec, write_dataset
from typer.testing import CliRunner

from wllm_ray.cli import app
from wllm_ray.dataset.documents import read_manifest
from wllm_ray.dataset.manifest import document_bytes
from wllm_ray.dataset.reader import load_dataset
from wllm_ray.dataset.rowtable import read_rows
from wllm_ray.dataset.shard import ROWS_SCHEMA
from wllm_ray.dataset.store import open_store
from wllm_ray.dataset.verify import verify_dataset
from wllm_ray.digest import canonical_json
from wllm_ray.errors import IntegrityError, NotFoundError, StorageError

pytestmark = pytest.mark.requirement("D-6")


@pytest.fixture
def folder(local, tmp_path):
    write_dataset(local, make_rows(5, failed=[FAILED_ROW]))
    return tmp_path / "root/datasets/d"


def the(folder, pattern):
    return next(iter(sorted(folder.glob(pattern))))


def load(folder, **options):
    return load_dataset(folder.parents[1], "d", **options)


def refused(code, match, call):
    with pytest.raises(IntegrityError, match=match) as error:
        call()
    assert error.value.code == code


def faults(folder):
    report = verify_dataset(folder.parents[1], "d")
    assert not report.ok
    return [(fault.code, fault.file) for fault in report.faults]


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("pattern", ["shard-00001*.npy", "shard-00000*.rows.arrow"])
def test_truncated(folder, pattern):
    path = the(folder, pattern)
    path.write_bytes(path.read_bytes()[:-1])
    refused("size_mismatch", path.name, lambda: load(folder))
    refused("size_mismatch", path.name, lambda: load(folder, verify="off"))
    assert faults(folder) == [("size_mismatch", path.name)]


@pytest.mark.parametrize("pattern", ["shard-00001*.npy", "shard-00000*.rows.arrow"])
def test_missing(folder, pattern):
    path = the(folder, pattern)
    path.unlink()
    refused("file_missing", path.name, lambda: load(folder))
    assert faults(folder) == [("file_missing", path.name)]


def test_a_flipped_bit_in_the_features(folder):
    path = the(folder, "shard-00001*.npy")
    flip(path)
    dataset = load(folder)
    assert len(dataset.row_ids) == 4
    refused("digest_mismatch", path.name, lambda: dataset.features)
    refused("digest_mismatch", path.name, lambda: list(dataset.iter_batches(2)))
    refused("digest_mismatch", path.name, dataset.to_torch)
    refused("digest_mismatch", path.name, dataset.to_arrow)
    refused("digest_mismatch", path.name, lambda: load(folder, verify="full"))
    assert load(folder, verify="off").features.shape == (4, 4)
    assert faults(folder) == [("digest_mismatch", path.name)]


def test_a_flipped_bit_in_the_rows(folder):
    path = the(folder, "shard-00000*.rows.arrow")
    flip(path, at=len(path.read_bytes()) // 2)
    dataset = load(folder)
    assert dataset.features.shape == (4, 4)
    refused("digest_mismatch", path.name, lambda: dataset.row_ids)
    assert faults(folder) == [("digest_mismatch", path.name)]


def test_a_flipped_bit_in_the_header_is_refused_even_unverified(folder):
    path = the(folder, "shard-00000*.npy")
    flip(path, at=20)
    refused("array_invalid", path.name, lambda: load(folder, verify="off").features)


def test_every_fault_is_listed(folder):
    for pattern in ("shard-00000*.npy", "shard-00001*.rows.arrow"):
        flip(the(folder, pattern))
    (folder / "spec.json").unlink()
    flip(folder / "shard-00001.receipt.json")
    codes = faults(folder)
    assert codes[0] == ("file_missing", "spec.json")
    assert [code for code, _ in codes].count("digest_mismatch") == 3
    refused("file_missing", "spec.json", lambda: load(folder, verify="full"))


def test_a_shard_is_checked_once(folder):
    dataset = load(folder)
    first = dataset.features
    flip(the(folder, "shard-00001*.npy"))
    assert dataset.features is not None
    assert first.shape == (4, 4)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_links_out_of_the_root(folder, tmp_path, kind):
    outside = tmp_path / "outside"
    target = the(folder, "shard-00000*.npy") if kind == "file" else folder
    shutil.move(target, outside)
    target.symlink_to(outside)
    refused("name_invalid", "leaves the storage root", lambda: load(folder))


def test_a_link_put_there_after_opening(folder, tmp_path):
    dataset = load(folder)
    path = the(folder, "shard-00000*.npy")
    shutil.move(path, tmp_path / "outside")
    path.symlink_to(tmp_path / "outside")
    refused("name_invalid", "leaves the storage root", lambda: dataset.features)


def test_a_link_inside_the_root_is_followed(folder):
    path = the(folder, "shard-00000*.npy")
    path.rename(folder / "elsewhere")
    path.symlink_to("elsewhere")
    assert load(folder, verify="full").features.shape == (4, 4)


def test_a_folder_where_a_file_should_be(folder):
    path = the(folder, "shard-00000*.npy")
    path.unlink()
    path.mkdir()
    refused("file_missing", path.name, lambda: load(folder))


def test_no_manifest_no_dataset(folder):
    (folder / "manifest.json").unlink()
    with pytest.raises(NotFoundError, match="it was begun but not committed"):
        load(folder)
    with pytest.raises(NotFoundError):
        verify_dataset(folder.parents[1], "d")


def test_a_damaged_manifest_is_a_fault(folder):
    flip(folder / "manifest.json", at=5)
    refused("manifest_invalid", "manifest", lambda: load(folder))
    assert faults(folder) == [("manifest_invalid", "manifest.json")]


@pytest.mark.requirement("D-1")
def test_a_moved_root_still_loads(folder, tmp_path):
    before = load(folder).features.copy()
    shutil.copytree(tmp_path / "root", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "root")
    moved = load_dataset(f"file://{tmp_path}/elsewhere", "d", verify="full")
    assert np.array_equal(moved.features, before)


def test_a_folder_under_another_id(folder):
    folder.rename(folder.parent / "e")
    match = "holds the manifest of dataset 'd', .* rename it back to datasets/d"
    refused("rows_inconsistent", match, lambda: load_dataset(folder.parents[1], "e"))
    report = verify_dataset(folder.parents[1], "e")
    assert [fault.code for fault in report.faults] == ["rows_inconsistent"]
    assert "rename datasets/e back to datasets/d" in report.advice
    assert "restore" not in report.advice
    (folder.parent / "e").rename(folder)
    assert verify_dataset(folder.parents[1], "d").ok
    flip(folder / "manifest.json")
    assert "restore it from a copy" in verify_dataset(folder.parents[1], "d").advice


class Forged:
    """A dataset whose records were rewritten to agree with other bytes, as a liar would."""

    def __init__(self, folder):
        self.folder = folder
        self.document = json.loads((folder / "manifest.json").read_bytes())

    def replace_file(self, role, data, site=None):
        files = self.document["shards"][0]["files"]
        entry = next(e for e in files if (e["role"], e["site"]) == (role, site))
        digest = hashlib.sha256(data).hexdigest()
        of_site = "" if site is None else f".{site}"
        suffix = f"{of_site}.npy" if role == "features" else ".rows.arrow"
        entry.update(name=f"shard-00000-{digest[:16]}{suffix}", sha256=digest, bytes=len(data))
        (self.folder / entry["name"]).write_bytes(data)

    def seal(self, **shard):
        """Write the manifest with its inner digests made right again."""
        self.document["shards"][0].update(shard)
        shards = [
            {
                "first_row": s["first_row"],
                "rows": s["rows"],
                "rows_sha256": s["rows_sha256"],
                "features_sha256": [e["sha256"] for e in s["files"] if e["role"] == "features"],
            }
            for s in self.document["shards"]
        ]
        manifest = self.document
        names = ("sites", "position", "storage_dtype", "shard_format", "shard_layout")
        limits = ("max_rows_per_shard", "max_bytes_per_shard")
        content = {
            "format": "wllm_ray.content/1",
            "fingerprint": manifest["fingerprint"],
            "shards": shards,
            "spec": {name: manifest[name] for name in (*names, *limits)}
            | {
                "model_revision": manifest["model"]["revision"],
                "tokenizer_revision": manifest["tokenizer"]["revision"],
            },
        }
        manifest["content_sha256"] = hashlib.sha256(canonical_json(content)).hexdigest()
        body = {key: value for key, value in manifest.items() if key != "manifest_sha256"}
        manifest["manifest_sha256"] = hashlib.sha256(canonical_json(body)).hexdigest()
        (self.folder / "manifest.json").write_bytes(canonical_json(manifest))


def test_a_forger_cannot_store_nan(folder):
    forged = Forged(folder)
    data = bytearray(the(folder, "shard-00000*.npy").read_bytes())
    data[-4:] = np.float32("nan").tobytes()
    forged.replace_file("features", bytes(data))
    forged.seal()
    refused("values_not_finite", "NaN or infinity", lambda: load(folder).features)
    assert ("values_not_finite", forged.document["shards"][0]["files"][0]["name"]) in (
        faults(folder)
    )


def test_a_forger_cannot_store_objects(folder):
    forged = Forged(folder)
    data = the(folder, "shard-00000*.npy").read_bytes()
    forged.replace_file("features", data.replace(b"'<f4'", b"'|O' ", 1))
    forged.seal()
    refused("array_invalid", r"found .*\|O", lambda: load(folder).features)


def arrow_file(table):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def rows_table(folder):
    return pa.ipc.open_file(the(folder, "shard-00000*.rows.arrow")).read_all()


def changed_column(table, name, change):
    values = table[name].to_pylist()
    change(values)
    at = ROWS_SCHEMA.get_field_index(name)
    field = ROWS_SCHEMA.field(name)
    return table.set_column(at, field, pa.array(values, field.type)).cast(ROWS_SCHEMA)


def put(position, value):
    def change(values):
        values[position] = value

    return change


TABLE_LIES = {
    "row numbers": ("row", put(0, 7), "the row numbers"),
    "negative row": ("row", put(0, -1), "the row numbers"),
    "failed and ok": ("status", put(1, "ok"), "the number of failures"),
    "no reason": ("failure", put(1, None), "the failures"),
    "offset shifted": ("offset", put(2, 0), "the offsets"),
    "offset of a failed row": ("offset", put(1, 1), "the offsets"),
    "offset missing": ("offset", put(0, None), "the offsets"),
    "length zero": ("length", put(0, 0), "the lengths"),
    "length negative": ("length", put(0, -1), "the lengths"),
    "length beyond the file": ("length", put(2, 2), "the number of feature rows"),
    "no token ids": ("token_ids", put(0, None), "the token ids of good rows"),
    "no token digest": ("token_sha256", put(0, None), "the token digests"),
}


@pytest.mark.parametrize("lie", TABLE_LIES)
def test_each_way_a_rows_table_can_lie(folder, lie):
    column, change, match = TABLE_LIES[lie]
    forged = Forged(folder)
    forged.replace_file("rows", arrow_file(changed_column(rows_table(folder), column, change)))
    forged.seal()
    refused("rows_inconsistent", match, lambda: load(folder).row_ids)


DEEP_LIES = {
    "other token ids": ("token_ids", put(0, [9, 9]), "digest_mismatch", "token_sha256"),
    "other request": ("request_sha256", put(0, b"\0" * 32), "digest_mismatch", "requests_sha256"),
    "other code": ("status", put(1, "poisonous"), "digest_mismatch", "rows_sha256"),
    "failure of another code": (
        "failure",
        put(1, '{"code":"poisonous","message":"","permanent":true,"stage":"capture"}'),
        "digest_mismatch",
        "failure codes",
    ),
    "failure that is none": ("failure", put(1, "{}"), "table_invalid", "cannot be read"),
    "same id twice": ("id", put(2, "r-0"), "rows_inconsistent", "same id"),
    "metadata that is not JSON": ("metadata", put(0, "{"), "invalid_json", "not JSON"),
}


@pytest.mark.parametrize("lie", DEEP_LIES)
def test_each_digest_over_rows_is_recomputed_by_verify(folder, lie):
    column, change, code, match = DEEP_LIES[lie]
    forged = Forged(folder)
    forged.replace_file("rows", arrow_file(changed_column(rows_table(folder), column, change)))
    forged.seal()
    report = verify_dataset(folder.parents[1], "d")
    assert [fault.code for fault in report.faults] == [code]
    assert match in report.faults[0].message


def other_tables(table):
    yield "not arrow", b"not an arrow file"
    yield "a column less", arrow_file(table.drop_columns(["failure"]))
    yield "another order", arrow_file(table.select(ROWS_SCHEMA.names[::-1]))
    yield "two batches", two_batches(table)
    yield (
        "another version",
        arrow_file(
            table.replace_schema_metadata({"format": "wllm_ray.rows", "format_version": "2"})
        ),
    )
    yield (
        "32-bit offsets",
        arrow_file(
            table.set_column(
                1, pa.field("id", pa.string(), nullable=False), table["id"].cast("string")
            )
        ),
    )


def two_batches(table):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=2):
            writer.write_batch(batch)
    return sink.getvalue().to_pybytes()


def test_rows_tables_of_another_shape(folder):
    for name, data in list(other_tables(rows_table(folder))):
        forged = Forged(folder)
        forged.replace_file("rows", data)
        forged.seal()
        refused("table_invalid", "expected", lambda: load(folder).row_ids)
        assert name


def test_fewer_rows_than_the_manifest_says(folder):
    forged = Forged(folder)
    forged.replace_file("rows", arrow_file(rows_table(folder).slice(0, 2)))
    forged.seal()
    refused("rows_inconsistent", "the number of rows", lambda: load(folder).row_ids)


def test_a_manifest_of_other_receipts_and_another_spec(folder):
    rows = make_rows(5, failed=[FAILED_ROW])
    other = make_spec(rows, position="first")
    (folder / "spec.json").write_bytes(document_bytes(other))
    assert ("digest_mismatch", "spec.json") in faults(folder)
    assert manifest_of(folder).position == "last_prompt"


@pytest.mark.parametrize("position", ["all_prompt", "index:0,-1"])
def test_lengths_must_fit_the_position(folder, position):
    """A table that agrees with itself, under a position that it cannot have."""
    shard = manifest_of(folder).shards[0]
    data = (folder / shard.rows_file.name).read_bytes()
    assert read_rows(data, shard, "mean_prompt").num_rows == 3
    refused(
        "rows_inconsistent",
        "the lengths that the position gives contradict",
        lambda: read_rows(data, shard, position),
    )


def manifest_of(folder):
    return read_manifest((folder / "manifest.json").read_bytes())


# --- one file for each site -----------------------------------------------------------------------

SITES = ("L0_resid_post", "L1_attn_out_prelinear", "L2_mlp_out")


@pytest.fixture
def per_site(local, tmp_path):
    rows = make_rows(5, failed=[FAILED_ROW])
    widths = (4, 6, 4)
    write_dataset(local, rows, position="all_prompt", sites=SITES, site_widths=widths)
    return tmp_path / "root/datasets/d"


@pytest.mark.parametrize("site", SITES)
def test_a_damaged_site_is_refused_and_the_others_are_not_read(per_site, site):
    path = the(per_site, f"shard-00001*.{site}.npy")
    flip(path)
    dataset = load(per_site)
    for other in set(SITES) - {site}:
        assert dataset.site(other).shape[0] == 11
        assert len(next(dataset.iter_batches(20, site=other)).features) == 11
    for call in (
        lambda: dataset.site(site),
        lambda: dataset.select(["r-4"], site=site),
        lambda: list(dataset.iter_batches(2, site=site)),
        lambda: dataset.to_torch(site=site),
        dataset.to_arrow,
        lambda: load(per_site, verify="full"),
    ):
        refused("digest_mismatch", path.name, call)
    assert faults(per_site) == [("digest_mismatch", path.name)]


@pytest.mark.parametrize("damage", ["missing", "truncated", "a file of another site"])
def test_a_site_without_its_whole_file_is_found_before_anything_is_read(per_site, damage):
    path = the(per_site, "shard-00000*.L1_attn_out_prelinear.npy")
    other = the(per_site, "shard-00000*.L2_mlp_out.npy").read_bytes()
    code = "file_missing" if damage == "missing" else "size_mismatch"
    path.unlink()
    if damage != "missing":
        path.write_bytes(other if damage == "a file of another site" else other[:-1])
    refused(code, path.name, lambda: load(per_site, verify="off"))
    assert faults(per_site) == [(code, path.name)]


def test_the_files_of_two_sites_that_were_exchanged(per_site):
    """They have the same shape, so only their digests tell."""
    first, second = (the(per_site, f"shard-00000*.{site}.npy") for site in (SITES[0], SITES[2]))
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    assert faults(per_site) == [("digest_mismatch", first.name), ("digest_mismatch", second.name)]
    refused("digest_mismatch", first.name, lambda: load(per_site).site(SITES[0]))


def test_a_file_of_a_site_that_no_record_names_is_told_and_never_read(per_site):
    before = load(per_site).site(SITES[0]).copy()
    copy = per_site / f"shard-00000-{'0' * 16}.{SITES[0]}.npy"
    shutil.copy(the(per_site, f"shard-00000*.{SITES[2]}.npy"), copy)
    report = verify_dataset(per_site.parents[1], "d")
    assert report.ok
    assert report.notes == (f"datasets/d/{copy.name}: {copy.stat().st_size} bytes, no record",)
    assert np.array_equal(load(per_site, verify="full").site(SITES[0]), before)


def test_a_forger_cannot_store_a_site_of_another_width(per_site):
    forged = Forged(per_site)
    wider = the(per_site, "shard-00000*.L1_attn_out_prelinear.npy").read_bytes()
    forged.replace_file("features", wider, site=SITES[0])
    forged.seal()
    refused("size_mismatch", r"shape \(6, 4\) take 224 bytes, but 272", lambda: load(per_site))
    forged.document["shards"][0]["files"][0]["shape"] = [6, 6]
    forged.seal()
    refused("array_invalid", r"expected features of shape \(6, 4\)", lambda: load(per_site))


def test_a_forger_cannot_store_nan_in_one_site(per_site):
    forged = Forged(per_site)
    data = bytearray(the(per_site, f"shard-00000*.{SITES[2]}.npy").read_bytes())
    data[-4:] = np.float32("nan").tobytes()
    forged.replace_file("features", bytes(data), site=SITES[2])
    forged.seal()
    dataset = load(per_site)
    assert dataset.site(SITES[0]).shape == (11, 4)
    refused("values_not_finite", SITES[2], lambda: dataset.site(SITES[2]))


def test_ragged_lengths_must_fit_the_token_ids(per_site):
    """A table that agrees with itself and with the file, but gives a row another row's tokens."""

    def moved(name, values):
        return lambda table: changed_column(
            table, name, lambda old: old.__setitem__(slice(None), values)
        )

    table = rows_table(per_site)
    assert table["length"].to_pylist() == [2, 0, 4]
    table = moved("length", [3, 0, 3])(table)
    table = moved("offset", [0, None, 3])(table)
    forged = Forged(per_site)
    forged.replace_file("rows", arrow_file(table))
    forged.seal()
    match = "the lengths that the position gives contradict"
    refused("rows_inconsistent", match, lambda: load(per_site).offsets)
    assert [code for code, _ in faults(per_site)] == ["rows_inconsistent"]


@pytest.mark.requirement("L-4")
def test_the_command_line_says_what_to_do_about_one_fault_and_about_a_new_name(folder):
    def verified():
        result = CliRunner().invoke(app, ["verify", str(folder)])
        assert result.exit_code == 2
        return result

    flip(the(folder, "shard-00000*.npy"))
    damaged = verified()
    assert re.search(r"^d: 8 files, \d+ bytes, 1 fault$", damaged.stdout, re.MULTILINE)
    assert "restore it from a copy, or capture it again under another" in damaged.stderr
    folder = folder.rename(folder.parent / "e")
    renamed = verified()
    assert "e: 1 file, 0 bytes, 1 fault" in renamed.stdout
    assert "rename datasets/e back to datasets/d" in renamed.stderr
    assert "restore" not in renamed.stderr


@pytest.mark.parametrize("role", ["features", "rows", "receipt"])
@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_what_is_no_file_is_a_missing_file_and_nobody_waits_for_it(folder, role, make):
    pattern = {"features": "*.npy", "rows": "*.rows.arrow", "receipt": "*.receipt.json"}[role]
    path = the(folder, pattern)
    path.unlink()
    make(path)
    assert ("file_missing", path.name) in faults(folder)
    if role != "receipt":
        refused("file_missing", path.name, lambda: load(folder, verify="full"))


def test_a_folder_where_an_object_should_be_written_is_told(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(StorageError, match="something that is no file stands there"):
        open_store(tmp_path).put("a", b"x")

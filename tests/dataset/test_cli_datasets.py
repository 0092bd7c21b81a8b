"""Commands about datasets that are there, as they are typed: verify, inspect, gc and merge."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from dataset_builders import capture, make_rows, make_spec, rows_of, write_dataset
from typer.testing import CliRunner

from wllm_ray.cli import app
from wllm_ray.cli.datasets import FIRST_FEW, _shown
from wllm_ray.dataset.format.layout import manifest_key, receipt_key
from wllm_ray.dataset.reading.verify import verify_dataset
from wllm_ray.dataset.stores.local import LocalStore
from wllm_ray.dataset.writing.writer import create_spec, stage_shard
from wllm_ray.errors import StorageError

pytestmark = pytest.mark.requirement("L-4")


@pytest.fixture
def root(tmp_path):
    return str(tmp_path / "root")


@pytest.fixture
def store(local):
    return local


def run(*arguments, code=0):
    result = CliRunner().invoke(app, list(arguments))
    assert not result.exception or isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == code, result.output
    return result


def damage(store, manifest, shard=0):
    key = f"datasets/{manifest.dataset_id}/{manifest.shards[shard].rows_file.name}"
    store.put(key, store.get(key)[:-1] + b"\x55", mode="overwrite")
    return key.rpartition("/")[2]


def begin(store, dataset_id="begun"):
    rows = make_rows(6)
    spec = make_spec(rows, dataset_id=dataset_id)
    create_spec(store, spec)
    part = rows_of(spec, rows, 1)
    stage_shard(store, spec, 1, part, [capture(part, spec)])
    return spec


# --- verify ---------------------------------------------------------------------------------------


def test_several_datasets_are_verified_and_one_fault_is_enough(root, store):
    write_dataset(store, make_rows(6), dataset_id="a")
    name = damage(store, write_dataset(store, make_rows(6), dataset_id="b"))
    begin(store)
    assert run("verify", root, "a").stdout.startswith("a: 8 files, ")
    for which in (["a", "b"], ["--all"]):
        result = run("verify", root, *which, code=2)
        lines = result.stdout.splitlines()
        assert [line.partition(":")[0] for line in lines] == [
            "a",
            "b",
            f"  fault [digest_mismatch] {name}",
            "1 of 2 datasets has faults",
        ]
        assert lines[-1].endswith(": b")
        assert "restore it from a copy" in result.stderr
        reports = run("verify", root, *which, "--json", code=2).stdout.splitlines()
        assert [json.loads(line)["ok"] for line in reports] == [True, False]


def test_a_dataset_that_is_not_there_does_not_keep_the_others_from_being_verified(root, store):
    for one in "ab":
        damage(store, write_dataset(store, make_rows(6), dataset_id=one))
    write_dataset(store, make_rows(6), dataset_id="c")
    result = run("verify", root, "a", "nope", "b", "c", code=2)
    assert result.stdout.splitlines()[-1] == (
        "2 of 4 datasets have faults: a, b; 1 of 4 datasets is not committed: nope"
    )
    assert "error [dataset_not_found]: no committed dataset 'nope'" in result.stderr
    assert result.stderr.count("restore it from a copy") == 1
    reports = run("verify", root, "c", "nope", "--json", code=2).stdout.splitlines()
    assert [json.loads(line)["ok"] for line in reports] == [True, False]
    assert json.loads(reports[1])["error"]["code"] == "dataset_not_found"
    assert run("verify", root, "c", "c").stdout.endswith("no fault in 2 datasets\n")


def test_a_dataset_that_cannot_be_read_does_not_keep_the_others_from_being_verified(
    root, store, monkeypatch
):
    for one in "abc":
        write_dataset(store, make_rows(6), dataset_id=one)
    real = LocalStore.get

    def get(self, key, **options):
        if key.startswith("datasets/b/"):
            raise StorageError(f"{key}: the disk is broken")
        return real(self, key, **options)

    monkeypatch.setattr(LocalStore, "get", get)
    result = run("verify", root, "a", "b", "nope", "c", code=2)
    lines = result.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines[:-1]] == ["a", "c"]
    assert lines[-1] == (
        "1 of 4 datasets is not committed: nope; 1 of 4 datasets cannot be read: b"
    )
    assert "error [storage_failed]: datasets/b/manifest.json: the disk" in result.stderr
    reports = run("verify", root, "b", "c", "--json", code=2).stdout.splitlines()
    assert [json.loads(line)["ok"] for line in reports] == [False, True]
    assert json.loads(reports[0])["dataset_id"] == "b"
    assert "the disk is broken" in run("verify", root, "b", code=2).stderr


def test_a_root_where_nothing_is_committed_yet(root, store):
    assert "check the root" in run("verify", root, "--all", code=2).stderr
    for name in ("b", "a"):
        begin(store, name)
    assert "begun there: a, b; `wllm gc` says" in run("verify", root, "--all", code=2).stderr


def test_a_fault_names_its_file_once(root, store):
    name = damage(store, write_dataset(store, make_rows(6)))
    (line,) = (one for one in run("verify", root, "d", code=2).stdout.splitlines() if name in one)
    assert line.startswith(f"  fault [digest_mismatch] {name}: expected SHA-256 ")
    assert line.count(name) == 1


def test_nothing_is_written_to_stderr_that_is_no_terminal(root, store):
    write_dataset(store, make_rows(6), dataset_id="a")
    command = [sys.executable, "-c", "from wllm_ray.cli import main; main()"]
    for arguments in (["verify", root, "a"], ["merge", root, "a", "--into", "b"]):
        ran = subprocess.run([*command, *arguments], capture_output=True, check=True)
        assert (ran.stderr, bool(ran.stdout)) == (b"", True)


def test_an_id_that_cannot_be_is_refused_before_anything_is_read(root, store):
    write_dataset(store, make_rows(6), dataset_id="a")
    assert not run("verify", root, "a", "../up", code=2).stdout


def test_files_without_a_record_are_for_gc(root, store):
    write_dataset(store, make_rows(6))
    store.put("datasets/d/.tmp-host-1-1", b"four")
    result = run("verify", root, "d")
    assert "  note: datasets/d/.tmp-host-1-1: 4 bytes, no record" in result.stdout
    assert "`wllm gc` says which of the files without a record can go" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--all", "a"], "--all takes no dataset id, found 'a'"),
        (["--all"], "no dataset is committed under"),
        (["begun"], "begun but not committed; shards staged so far: 1"),
        (["x"], "committed there: none"),
        ([], "ROOT/datasets/DATASET_ID, or --all for every dataset under ROOT; found"),
    ],
)
def test_what_cannot_be_verified(root, store, arguments, match):
    begin(store)
    assert match in run("verify", root, *arguments, code=2).stderr


# --- inspect --------------------------------------------------------------------------------------


def test_a_dataset_that_was_begun_says_what_is_staged(root, store):
    spec = begin(store)
    facts = json.loads(run("inspect", root, "begun", "--json").stdout)
    assert (facts["state"], facts["rows"], facts["shards"]) == ("begun", 6, 2)
    assert (facts["shards_staged"], facts["rows_staged"]) == (1, 3)
    assert facts["missing_shards"] == [0]
    assert facts["bytes_staged"] == sum(
        size for key, size in store.list("datasets") if key.endswith((".npy", ".arrow"))
    )
    assert facts["sites"] == list(spec.sites)
    assert "run the same job or merge again" in run("inspect", root, "begun").stdout


def test_json_has_all_shards_that_are_missing(root, store):
    create_spec(store, make_spec(make_rows(30), per_shard=1, dataset_id="begun"))
    facts = json.loads(run("inspect", root, "begun", "--json").stdout)
    assert facts["missing_shards"] == list(range(30))
    assert "(30 in all; --json lists them)" in run("inspect", root, "begun").stdout


def test_a_committed_dataset_is_shown_without_opening_a_shard(root, store):
    manifest = write_dataset(store, make_rows(6))
    for shard in manifest.shards:
        for entry in shard.files:
            store.delete(f"datasets/d/{entry.name}")
    facts = json.loads(run("inspect", root, "d", "--json").stdout)
    assert facts["state"] == "committed"
    assert facts["content_sha256"] == manifest.content_sha256
    assert (facts["dtype"], facts["shard_format"]) == ("float32", "npy")


def test_empty_lists_are_dashes_and_long_ones_are_cut(root, store):
    manifest = write_dataset(store, make_rows(6))
    rows = make_rows(6)
    spec = make_spec(rows, dataset_id="whole")
    create_spec(store, spec)
    for number in range(len(spec.shards)):
        part = rows_of(spec, rows, number)
        stage_shard(store, spec, number, part, [capture(part, spec)])
    shown = [line.split() for line in run("inspect", root, "whole").stdout.splitlines()]
    assert ["missing_shards", "–"] in shown
    assert ", ".join(manifest.sites) in run("inspect", root, "d").stdout
    sites = [f"L{number}_resid_post" for number in range(110)]
    cut = ", ".join(sites[:FIRST_FEW])
    assert _shown(sites) == f"{cut}, … (110 in all; --json lists them)"


def test_what_cannot_be_shown(root, store):
    begin(store)
    assert "committed there: none" in run("inspect", root, "x", code=2).stderr
    store.put(receipt_key("begun", 1), b"{}", mode="overwrite")
    assert "shard-00001.receipt.json" in run("inspect", root, "begun", code=2).stderr


# --- gc -------------------------------------------------------------------------------------------


@pytest.fixture
def littered(root, store, tmp_path):
    write_dataset(store, make_rows(6))
    begin(store)
    store.put("datasets/d/.tmp-host-1-1", b"four")
    store.put("datasets/d/.tmp-host-1-2", b"four")
    os.utime(tmp_path / "root/datasets/d/.tmp-host-1-2", (0, 0))
    return root


@pytest.mark.requirement("D-5")
def test_leftovers_are_listed_and_removed_on_request_only(littered, store):
    before = store.list("datasets")
    lines = run("gc", littered).stdout.splitlines()
    assert lines[0].startswith("begun: begun, 1 of 2 shards staged")
    assert lines[1:] == [
        "left, too recent: datasets/d/.tmp-host-1-1, 4 bytes, temporary",
        "removable: datasets/d/.tmp-host-1-2, 4 bytes, temporary",
        "1 file, 4 bytes can be removed; add --delete to remove them",
    ]
    assert store.list("datasets") == before
    result = run("gc", f"{littered}/datasets/d", "--delete", "--older-than", "0")
    assert result.stdout.splitlines()[-1] == "2 files, 8 bytes removed"
    assert json.loads(run("gc", littered, "d", "--json").stdout)["files"] == 0
    assert verify_dataset(store, "d").notes == ()


@pytest.mark.requirement("D-5")
def test_a_damaged_dataset_keeps_everything_and_the_others_are_cleaned(littered, store):
    key = receipt_key("begun", 1)
    store.put(key, b"{}", mode="overwrite")
    store.put("datasets/begun/.tmp-host-1-1", b"four")
    result = run("gc", littered, "--delete", "--older-than", "0", code=2)
    assert "damaged: begun [" in result.stdout
    assert key in result.stdout
    assert result.stdout.splitlines()[-1] == "2 files, 8 bytes removed"
    assert store.size("datasets/begun/.tmp-host-1-1") == 4
    facts = json.loads(run("gc", littered, "begun", "--json", code=2).stdout)
    assert facts["datasets"][0]["damage"]["code"] == "format_unknown"


@pytest.mark.parametrize("hours", ["1e8", "inf", "nan", "-1"])
def test_hours_before_the_first_date_are_refused(littered, hours):
    refused = run("gc", littered, "--older-than", hours, code=2)
    assert "--older-than" in refused.stderr
    assert "internal_error" not in refused.stderr
    assert not refused.stdout


def test_a_hundred_years_are_no_error(littered):
    assert "0 files, 0 bytes" in run("gc", littered, "--older-than", "1e6").stdout


def test_what_is_no_storage_root_is_no_clean_one(littered, store, tmp_path):
    refused = run("gc", str(tmp_path / "nowhere"), code=2)
    assert f"expected a storage root, found no folder {tmp_path}/nowhere" in refused.stderr
    assert not refused.stdout
    refused = run("gc", f"{littered}/datasets", code=2)
    assert f"inside a storage root; name the root, {littered}" in refused.stderr
    (tmp_path / "datasets").mkdir()
    assert run("gc", str(tmp_path / "datasets")).stdout == "0 files, 0 bytes can be removed\n"


def test_one_shard_is_not_one_shards(root, store):
    create_spec(store, make_spec(make_rows(2), dataset_id="one"))
    assert run("gc", root).stdout.startswith("begun: one, 0 of 1 shard staged, ")


def test_giving_up_takes_an_id_and_delete(littered, store):
    assert "expected ROOT DATASET_ID" in run("gc", littered, "--abandon", code=2).stderr
    refused = run("gc", littered, "begun", "--abandon", "--delete", code=2)
    assert "a writer may be at work" in refused.stderr
    assert "is committed" in run("gc", littered, "d", "--abandon", code=2).stderr
    listed = run("gc", littered, "begun", "--abandon", "--older-than", "0").stdout
    assert listed.splitlines()[0] == (
        f"removable: {receipt_key('begun', 1)}, {store.size(receipt_key('begun', 1))} bytes"
    )
    assert "add --delete" in listed
    assert run("gc", littered, "begun", "--abandon").stdout == listed, "looking harms nobody"
    again = ("gc", littered, "begun", "--abandon", "--older-than", "0", "--delete")
    run(*again)
    assert [key for key, _ in store.list("datasets/begun")] == [manifest_key("begun")]
    assert "given up: begun; its id is kept from use" in run("gc", littered).stdout
    for command in ("inspect", "verify"):
        told = run(command, littered, "begun", code=2).stderr
        assert "[dataset_not_found]: " in told
        assert "begun, and given up before it was committed" in told
    assert run(*again).stdout.startswith(f"removed: {manifest_key('begun')}, ")
    assert not [key for key, _ in store.list("datasets") if "begun" in key]


def test_a_begun_dataset_that_cannot_be_resumed_is_not_said_to_resume(root, store):
    begin(store)
    assert "run the same job or merge again" in run("inspect", root, "begun").stdout
    (key,) = (key for key, _ in store.list("datasets/begun") if key.endswith(".npy"))
    store.delete(key)
    refused = run("inspect", root, "begun", code=2).stderr
    assert f"[file_missing]: {key}: " in refused
    assert "remove the shard's receipt while no job is running" in refused


@pytest.mark.parametrize("into", [["--to-root", "memory://x"], []])
def test_nothing_is_written_that_ends_with_the_command(root, store, into):
    write_dataset(store, make_rows(3), dataset_id="a")
    refused = run("merge", root if into else "memory://x", "a", "--into", "b", *into, code=2)
    assert "memory:// lives in one process and ends with it" in refused.stderr


# --- merge ----------------------------------------------------------------------------------------


def test_two_datasets_become_one(root, store, tmp_path):
    write_dataset(store, make_rows(3), dataset_id="a")
    result = run("merge", root, "a", "--into", "copy", "--to-root", str(tmp_path / "other"))
    assert result.stdout.startswith("copy: 3 rows in 1 shard, ")
    facts = json.loads(run("merge", root, "a", "--into", "b", "--json").stdout)
    assert (facts["rows"], facts["rows_failed"], facts["shards"]) == (3, 0, 1)
    run("verify", root, "--all")
    refused = run("merge", root, "a", "b", "--into", "ab", code=2)
    assert "error [dataset_conflict] in merge: row id 'r-0' is in dataset 'a' and" in refused.stderr
    assert "--into" in run("merge", root, "a", code=2).stderr

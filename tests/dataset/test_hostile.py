"""A committed dataset that was damaged or tampered with: each way is refused by name."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from dataset_builders import FAILED_ROW, make_rows, make_spec, write_dataset
from forging import Forgery, flipped
from hostile_corpus import HUGE, LIES
from hostile_lies import BASES
from typer.testing import CliRunner

from wllm_ray.cli import app
from wllm_ray.dataset.format.manifest import document_bytes
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.reading.rowtable import good_rows
from wllm_ray.dataset.reading.verify import verify_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.errors import IntegrityError, NotFoundError, StorageError

pytestmark = pytest.mark.requirement("D-6")

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The folder with one good dataset of each kind."""
    folder = tmp_path_factory.mktemp("good")
    for name, asked in BASES.items():
        rows = make_rows(5, failed=[FAILED_ROW])
        write_dataset(open_store(folder / name), rows, **asked)
        assert verify_dataset(folder / name, "d").ok
    return folder


@pytest.fixture
def forge(good, tmp_path):
    """Makes a copy of a good dataset, to be damaged."""

    def copy(base):
        shutil.copytree(good / base, tmp_path / "root")
        return Forgery(tmp_path / "root/datasets/d")

    return copy


@pytest.fixture
def folder(forge):
    return forge("npy").folder


def load(folder, **options):
    return load_dataset(folder.parents[1], "d", **options)


def touch(dataset):
    """Read everything that a dataset has."""
    found = [dataset.row_ids, dataset.metadata, dataset.token_ids, dataset.failures]
    found += [dataset.site(site) for site in dataset.manifest.sites]
    if dataset.manifest.trace:
        files = dataset._files
        found += [files.traces(n, good_rows(files.rows(n))) for n in range(2)]
    return found


def refusal(folder):
    """When a dataset is refused whose user asks for nothing special, and how."""
    try:
        dataset = load(folder)
    except IntegrityError as error:
        return "open", error
    try:
        touch(dataset)
    except IntegrityError as error:
        return "access", error
    return "verify", None


def refused(code, match, call):
    with pytest.raises(IntegrityError, match=match) as error:
        call()
    assert error.value.code == code


def faults(folder):
    report = verify_dataset(folder.parents[1], "d")
    assert not report.ok
    return [(fault.code, fault.file) for fault in report.faults]


def the(folder, pattern):
    return next(iter(sorted(folder.glob(pattern))))


def flip(path, at=-1):
    path.write_bytes(flipped(at)(path.read_bytes()))


@pytest.mark.parametrize("name", LIES)
def test_each_lie_is_refused_with_its_own_code(forge, name):
    lie = LIES[name]
    forgery = forge(lie.base)
    lie.tell(forgery)
    stage, error = refusal(forgery.folder)
    assert stage == lie.stage
    assert error is None or error.code == lie.code
    report = verify_dataset(forgery.folder.parents[1], "d")
    assert lie.code in {fault.code for fault in report.faults}
    assert report.advice
    # A file is named where one was damaged, and nobody is sent a document in a message.
    damaged = forgery.damaged.name if forgery.damaged else "manifest.json"
    assert damaged in {fault.file for fault in report.faults}
    assert all(len(fault.message) < 2000 for fault in report.faults)
    assert error is None or not forgery.damaged or damaged in error.message


def test_no_lie_makes_anybody_believe_in_its_memory(good, tmp_path):
    """In a process of its own, which may not have what the lies promise."""
    for number, name in enumerate(HUGE):
        shutil.copytree(good / LIES[name].base, tmp_path / str(number))
        LIES[name].tell(Forgery(tmp_path / f"{number}/datasets/d"))
    finished = subprocess.run(
        [sys.executable, __file__, tmp_path],
        env=os.environ | {"PYTHONPATH": f"{HERE}:{HERE.parents[1]}"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        timeout=120,
    )
    assert finished.stdout.split() == [LIES[name].code for name in HUGE]


def print_refusals(folder):
    # Of addresses, not of pages: what is promised need not be touched to be asked for.
    resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, resource.RLIM_INFINITY))
    for number in range(len(HUGE)):
        report = verify_dataset(Path(folder) / str(number), "d")
        sys.stdout.write(f"{report.faults[0].code}\n")


# --- what the codes do not tell -------------------------------------------------------------------


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


def test_a_flipped_bit_in_the_rows_does_not_keep_anybody_from_the_features(folder):
    path = the(folder, "shard-00000*.rows.arrow")
    flip(path, at=0.5)
    dataset = load(folder)
    assert dataset.features.shape == (4, 4)
    refused("digest_mismatch", path.name, lambda: dataset.row_ids)
    assert faults(folder) == [("digest_mismatch", path.name)]


def test_headers_and_sizes_are_checked_even_unverified(folder):
    path = the(folder, "shard-00000*.npy")
    flip(path, at=20)
    refused("array_invalid", path.name, lambda: load(folder, verify="off").features)
    path.write_bytes(path.read_bytes()[:-1])
    refused("size_mismatch", path.name, lambda: load(folder, verify="off"))


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


def test_no_manifest_no_dataset(folder):
    (folder / "manifest.json").unlink()
    with pytest.raises(NotFoundError, match="it was begun but not committed"):
        load(folder)
    with pytest.raises(NotFoundError):
        verify_dataset(folder.parents[1], "d")


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


def test_the_spec_of_another_dataset(folder):
    rows = make_rows(5, failed=[FAILED_ROW])
    (folder / "spec.json").write_bytes(document_bytes(make_spec(rows, position="first")))
    assert faults(folder) == [("digest_mismatch", "spec.json")]


# --- one file for each site -----------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
def test_a_damaged_site_is_refused_and_the_others_are_not_read(forge, number):
    forgery = forge("sites")
    forgery.change("features", flipped(-1), shard=1, number=number)
    name = forgery.path("features", shard=1, number=number).name
    dataset = load(forgery.folder)
    sites = dataset.manifest.sites
    other, site = sites[1 - number], sites[number]
    assert dataset.site(other).shape[0] == 11
    assert len(next(dataset.iter_batches(20, site=other)).features) == 11
    for call in (
        lambda: dataset.site(site),
        lambda: dataset.select(["r-4"], site=site),
        lambda: list(dataset.iter_batches(2, site=site)),
        lambda: dataset.to_torch(site=site),
        dataset.to_arrow,
        lambda: load(forgery.folder, verify="full"),
    ):
        refused("digest_mismatch", name, call)
    assert faults(forgery.folder) == [("digest_mismatch", name)]


def test_a_file_of_a_site_that_no_record_names_is_told_and_never_read(forge):
    forgery = forge("sites")
    before = load(forgery.folder).site("embed").copy()
    copy = forgery.folder / f"shard-00000-{'0' * 16}.embed.npy"
    shutil.copy(forgery.path("features", number=1), copy)
    report = verify_dataset(forgery.folder.parents[1], "d")
    assert report.ok
    assert report.notes == (f"datasets/d/{copy.name}: {copy.stat().st_size} bytes, no record",)
    assert np.array_equal(load(forgery.folder, verify="full").site("embed"), before)


# --- the command line and the writer --------------------------------------------------------------


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


def test_a_folder_where_an_object_should_be_written_is_told(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(StorageError, match="something that is no file stands there"):
        open_store(tmp_path).put("a", b"x")


if __name__ == "__main__":
    print_refusals(sys.argv[1])

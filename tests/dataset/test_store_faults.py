"""What a local root does when the disk or a neighbour misbehaves."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dataset.dataset_builders import make_rows, write_dataset
from wllm_ray.dataset.reading.files import list_datasets
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.stores import local as local_module
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.errors import AlreadyExistsError, IntegrityError, StorageError

pytestmark = pytest.mark.requirement("D-4")


def files_under(path):
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file())


def test_no_temporary_is_left(local, tmp_path):
    local.put("d/a", b"x")
    local.put("d/a", b"x")
    with pytest.raises(AlreadyExistsError):
        local.put("d/a", b"y")
    local.put("d/a", b"z", mode="overwrite")
    stored = local.put_content("d/s-", ".npy", b"abc")
    assert files_under(tmp_path / "root") == sorted(["d/a", stored.key])


@pytest.mark.parametrize("write", ["create", "overwrite", "content"])
@pytest.mark.parametrize("failing", ["write", "fsync"])
def test_a_full_disk_leaves_nothing_and_says_so(local, tmp_path, monkeypatch, write, failing):
    local.put("d/there", b"x")

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(local_module.os, failing, full)
    call = {
        "create": lambda: local.put("d/a", b"x"),
        "overwrite": lambda: local.put("d/a", b"x", mode="overwrite"),
        "content": lambda: local.put_content("d/s-", ".npy", b"abc"),
    }[write]
    with pytest.raises(StorageError, match="No space left on device; nothing half-written"):
        call()
    assert files_under(tmp_path / "root") == ["d/there"]


FILE_TOO_LARGE = """
import resource, sys
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.errors import StorageError
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
store = open_store(sys.argv[1])
for write in (
    lambda: store.put_content("d/s-", ".npy", bytes(3 << 20)),
    lambda: store.put("d/a", bytes(3 << 20)),
    lambda: store.put("d/a", bytes(3 << 20), mode="overwrite"),
):
    try:
        write()
    except StorageError as error:
        print(error.message)
print(store.put("d/b", b"fits"))
"""


def test_a_write_that_the_system_ends_in_the_middle_leaves_nothing(tmp_path):
    """A real limit, on the size of a file: part of it is written before the system says no."""
    program = [sys.executable, "-c", FILE_TOO_LARGE, tmp_path / "root"]
    printed = subprocess.run(program, check=True, capture_output=True, text=True).stdout
    assert printed.count("File too large; nothing half-written was left") == 3
    assert printed.endswith("True\n")
    assert files_under(tmp_path / "root") == ["d/b"]


def test_what_a_killed_writer_left_is_in_nobodys_way(local, tmp_path, monkeypatch):
    """In the next container host name, process number and history are the same again."""
    names = []
    real = os.open
    monkeypatch.setattr(
        local_module.os, "open", lambda path, *a: (names.append(path), real(path, *a))[1]
    )
    local.put("d/a", b"x")
    local.put("d/b", b"x")
    temporary = [path for path in names if path.name.startswith(".tmp-")]
    assert len({path.name for path in temporary}) == 2
    assert len({path.name.rpartition("-")[0] for path in temporary}) == 1


def test_short_writes_are_continued(local, monkeypatch):
    real = os.write
    monkeypatch.setattr(local_module.os, "write", lambda fd, data: real(fd, data[:3]))
    local.put("a", b"0123456789")
    assert local.get("a") == b"0123456789"


def test_data_are_on_disk_before_the_name_is(local, monkeypatch):
    done = []
    for name in ("fsync", "link"):
        real = getattr(os, name)
        monkeypatch.setattr(
            local_module.os, name, lambda *a, n=name, r=real: (done.append(n), r(*a))[1]
        )
    local.put("a", b"x")
    assert done[-3:] == ["fsync", "link", "fsync"]


def test_a_file_under_its_content_name_is_on_disk_before_the_name_is(local, monkeypatch):
    local.put_content("d/s-", ".npy", b"x")
    done = told(monkeypatch, "fsync", "replace")
    local.put_content("d/s-", ".npy", b"abc")
    assert done == ["fsync", "replace", "fsync"]


def test_folders_are_durable_before_what_lies_in_them(local, tmp_path, monkeypatch):
    """Also those that another writer made, who may have died before they were."""
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True)
    synced = []
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *a, **k: (synced.append(str(path)), real(path, *a, **k))[1]
    )
    local.put("d/e/a", b"x")
    folders = [path for path in synced if Path(path).is_dir()]
    assert folders == [str(one) for one in (tmp_path, root, root / "d", root / "d" / "e")]
    synced.clear()
    local.put("d/e/b", b"x")
    assert [path for path in synced if Path(path).is_dir()] == [str(root / "d" / "e")]
    shutil.rmtree(root / "d")
    synced.clear()
    local.put_content("d/e/s-", ".npy", b"x")
    assert str(root / "d") not in synced, "nothing depends on it yet"
    local.put("d/e/b", b"x")
    assert {str(tmp_path), str(root), str(root / "d")} <= set(synced), "other folders than before"


def test_what_is_there_already_is_durable_too(local, monkeypatch):
    """Its writer may have died between the name and the fsync of the folder."""
    local.put("d/a", b"x")
    done = told(monkeypatch, "fsync", "link")
    assert local.put("d/a", b"x") is False
    assert done == ["fsync"]


def told(monkeypatch, *names):
    """What is called of these, in order, from now on."""
    done = []
    for name in names:
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, n=name, r=real: (done.append(n), r(*a))[1])
    return done


def test_names_of_others_are_not_listed(local, tmp_path):
    """Readers of a folder must not stumble over what anybody may put there."""
    local.put("d/a", b"x")
    folder = tmp_path / "root" / "d"
    for name in (b"back\\slash", b"two\nlines", b"not \xff text", b"esc\x1b[2J"):
        (folder / os.fsdecode(name)).write_bytes(b"y")
        (folder / os.fsdecode(b"folder " + name)).mkdir()
        (folder / os.fsdecode(b"folder " + name) / "z").write_bytes(b"y")
    (folder / "gut – 好").write_bytes(b"y")
    deep = folder
    for _ in range(40):
        deep = deep / "deeper"
    deep.mkdir(parents=True)
    (deep / "z").write_bytes(b"y")
    assert local.list("d") == [("d/a", 1), ("d/gut – 好", 1)]


def test_folders_without_end_are_not_followed(local, tmp_path):
    local.put("d/a", b"x")
    # No path is long enough for these.
    descriptors = [os.open(tmp_path / "root" / "d", os.O_RDONLY)]
    for _ in range(900):
        os.mkdir("n", dir_fd=descriptors[-1])
        descriptors.append(os.open("n", os.O_RDONLY, dir_fd=descriptors[-1]))
    try:
        assert local.list("d") == [("d/a", 1)]
    finally:
        while len(descriptors) > 1:
            os.close(descriptors.pop())
            os.rmdir("n", dir_fd=descriptors[-1])
        os.close(descriptors.pop())


def test_a_link_whose_answer_was_lost_is_recognised(local, monkeypatch):
    real = os.link

    def lost_answer(source, target):
        real(source, target)
        raise FileExistsError(errno.EEXIST, "exists")

    monkeypatch.setattr(local_module.os, "link", lost_answer)
    assert local.put("a", b"x") is True


@pytest.mark.parametrize("number", [errno.EIO, errno.ETIMEDOUT, errno.ESTALE])
@pytest.mark.parametrize("worked", [True, False])
def test_a_link_that_failed_counts_if_the_name_is_this_file(local, monkeypatch, number, worked):
    real = os.link

    def failing(source, target):
        if worked:
            real(source, target)
        raise OSError(number, "no answer")

    monkeypatch.setattr(local_module.os, "link", failing)
    if worked:
        assert local.put("a", b"x") is True
    else:
        with pytest.raises(StorageError, match="could not write a"):
            local.put("a", b"x")
    assert (local.size("a") == 1) is worked


def test_a_backup_that_holds_the_temporary_makes_no_winner(local, tmp_path, monkeypatch):
    real = os.link

    def late(source, target):
        real(source, tmp_path / "backup")
        target.write_bytes(b"another writer's")
        real(source, target)

    monkeypatch.setattr(local_module.os, "link", late)
    with pytest.raises(AlreadyExistsError):
        local.put("a", b"x")


def test_no_hard_links_is_refused_with_what_to_do(local, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "no")

    monkeypatch.setattr(local_module.os, "link", refuse)
    with pytest.raises(StorageError, match=r"no hard links.*choose another storage root"):
        local.put("a", b"x")
    assert local.probe().writable is False


@pytest.mark.requirement("D-1")
def test_folders_and_files_are_private(local, tmp_path):
    local.put("d/e/a", b"x")
    for path in (tmp_path / "root", tmp_path / "root/d", tmp_path / "root/d/e"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "root/d/e/a").stat().st_mode) == 0o600


@pytest.mark.requirement("D-6")
@pytest.mark.parametrize("key", ["link", "folder/file"])
def test_links_out_of_the_root_are_refused(local, tmp_path, key):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"secret")
    root = tmp_path / "root"
    root.mkdir()
    (root / "link").symlink_to(outside / "file")
    (root / "folder").symlink_to(outside)
    calls = (
        lambda: local.get(key),
        lambda: local.size(key),
        lambda: local.put(key, b"x", mode="overwrite"),
        lambda: local.delete(key),
        lambda: local.local_path(key),
    )
    for call in calls:
        with pytest.raises(IntegrityError, match="leaves the storage root") as error:
            call()
        assert error.value.code == "name_invalid"
    assert (outside / "file").read_bytes() == b"secret"


@pytest.mark.requirement("D-6")
def test_listings_leave_out_links_that_lead_nowhere_in_the_root(local, tmp_path):
    local.put("d/a", b"x")
    local.put("d/e/b", b"xy")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_bytes(b"secret")
    targets = {
        "d/file": tmp_path / "outside" / "file",
        "d/folder": tmp_path / "outside",
        "d/gone": tmp_path / "nothing",
        "d/dangling": "nothing",
        "d/below-a-file": "a/nothing",
        "d/itself": "itself",
        "d/inside": "e/b",
    }
    for key, target in targets.items():
        (tmp_path / "root" / key).symlink_to(target)
    assert local.list("d") == [("d/a", 1), ("d/e/b", 2), ("d/inside", 2)]
    with pytest.raises(IntegrityError, match="leaves the storage root"):
        local.get("d/file")
    with pytest.raises(IntegrityError, match="leaves the storage root"):
        local.list("d/folder")


@pytest.mark.requirement("D-6")
def test_a_foreign_link_beside_a_dataset_keeps_nobody_from_it(tmp_path):
    root = tmp_path / "root"
    write_dataset(open_store(root), make_rows(4))
    (root / "datasets/d/notes.txt").symlink_to(tmp_path / "elsewhere")
    (root / "datasets/other").symlink_to(tmp_path)
    assert len(load_dataset(root, "d", verify="full").row_ids) > 0
    assert list_datasets(open_store(root)) == ["d"]


@pytest.mark.requirement("D-6")
def test_a_link_to_itself_is_named_as_what_it_is(local, tmp_path):
    local.put("d/a", b"x")
    (tmp_path / "root/d/loop").symlink_to("loop")
    (tmp_path / "root/ring").symlink_to("ring")
    for call in (lambda: local.get("d/loop"), lambda: local.list("ring")):
        with pytest.raises(StorageError, match="a symbolic link on the way leads back to itself"):
            call()
    assert local.size("d/loop") is None


@pytest.mark.requirement("D-6")
def test_a_range_of_a_hostile_size_sets_nothing_aside(local):
    local.put("a", b"xyz")
    with pytest.raises(StorageError, match="expected 1152921504606846976 bytes"):
        local.get_range("a", 0, 1 << 60)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may write everywhere")
def test_a_folder_without_permission_says_so(local, tmp_path):
    local.put("d/a", b"x")
    (tmp_path / "root" / "d").chmod(0o500)
    with pytest.raises(StorageError, match=r"could not write .*: Permission denied"):
        local.put("d/b", b"x")
    (tmp_path / "root" / "d").chmod(0o700)


def test_a_root_that_is_itself_a_link_works(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    store = open_store(tmp_path / "alias")
    store.put("a/b", b"x")
    assert store.get("a/b") == b"x"
    assert store.list("a") == [("a/b", 1)]

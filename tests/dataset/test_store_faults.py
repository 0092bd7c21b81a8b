"""What the two backends do when the disk, the network or a neighbour misbehaves."""

from __future__ import annotations

import errno
import os
import stat

import obstore
import pytest
from obstore.store import MemoryStore

from wllm_ray.dataset import local as local_module
from wllm_ray.dataset import remote as remote_module
from wllm_ray.dataset.remote import ObjectStore
from wllm_ray.dataset.store import open_store
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


def test_a_link_whose_answer_was_lost_is_recognised(local, monkeypatch):
    real = os.link

    def lost_answer(source, target):
        real(source, target)
        raise FileExistsError(errno.EEXIST, "exists")

    monkeypatch.setattr(local_module.os, "link", lost_answer)
    assert local.put("a", b"x") is True


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


def test_a_root_that_is_itself_a_link_works(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to(tmp_path / "real")
    store = open_store(tmp_path / "alias")
    store.put("a/b", b"x")
    assert store.get("a/b") == b"x"
    assert store.list("a") == [("a/b", 1)]


class Unreliable:
    """The client's module with a put that stores and then fails, or fails and does not store."""

    def __init__(self, *, stores: bool) -> None:
        self._stores = stores

    def __getattr__(self, name):
        return getattr(obstore, name)

    def put(self, client, key, body, **options):
        if self._stores:
            obstore.put(client, key, body, **options)
        raise obstore.exceptions.GenericError("connection reset")


@pytest.mark.parametrize("stores", [True, False])
def test_a_lost_answer_is_settled_by_reading_back(monkeypatch, stores):
    store = ObjectStore(MemoryStore(), "memory://x")
    monkeypatch.setattr(remote_module, "obstore", Unreliable(stores=stores))
    if stores:
        assert store.put("a", b"x") is True
        assert store.get("a") == b"x"
    else:
        with pytest.raises(StorageError, match="nothing is there; run again") as error:
            store.put("a", b"x")
        assert error.value.code == "storage_failed"


def test_a_lost_answer_over_other_bytes_is_a_conflict(monkeypatch):
    store = ObjectStore(MemoryStore(), "memory://x")
    store.put("a", b"x")
    monkeypatch.setattr(remote_module, "obstore", Unreliable(stores=False))
    with pytest.raises(AlreadyExistsError):
        store.put("a", b"y")


def test_a_failed_overwrite_is_a_storage_error_without_foreign_text(monkeypatch):
    store = ObjectStore(MemoryStore(), "memory://x")
    monkeypatch.setattr(remote_module, "obstore", Unreliable(stores=False))
    with pytest.raises(StorageError, match="answered GenericError") as error:
        store.put_content("d/s-", ".npy", b"x")
    assert "connection reset" not in str(error.value)


class IgnoresConditions:
    """A server that overwrites whatever is asked."""

    def __getattr__(self, name):
        return getattr(obstore, name)

    def put(self, client, key, body, **_):
        return obstore.put(client, key, body, mode="overwrite")


def test_probe_finds_a_root_that_ignores_create_only(monkeypatch):
    store = ObjectStore(MemoryStore(), "memory://x")
    monkeypatch.setattr(remote_module, "obstore", IgnoresConditions())
    probe = store.probe()
    assert (probe.writable, probe.create_only) == (True, False)
    assert probe.detail == "create-only is not honoured"

"""The store contract: every backend passes all of it."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from wllm_ray.dataset.store import Store, open_store
from wllm_ray.errors import (
    AlreadyExistsError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)

pytestmark = pytest.mark.requirement("D-1", "D-4")


def test_keeps_the_protocol(store):
    assert isinstance(store, Store)


def test_put_then_get_gives_the_same_bytes(store):
    assert store.put("a/b/c", b"\x00\xff") is True
    assert store.get("a/b/c") == b"\x00\xff"
    assert store.size("a/b/c") == 2


def test_put_joins_buffers_of_any_shape(store):
    array = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
    store.put("a", [b"head", array.data, b"", np.empty((0, 2, 3), np.float32).data])
    assert store.get("a") == b"head" + array.tobytes()


def test_a_stream_has_the_same_bytes_and_lines(store):
    data = b"".join(b"%d \xe2\x80\xa8\r\n" % n for n in range(300_000)) + b"end"
    store.put("a/b", data)
    with store.open("a/b") as stream:
        assert list(stream) == data.splitlines(keepends=True)
    with store.open("a/b") as stream:
        assert stream.read(7) + stream.read() == data


def test_empty_object(store):
    store.put("a", b"")
    assert store.get("a") == b""
    with store.open("a") as stream:
        assert stream.read() == b""
    assert store.size("a") == 0


def test_create_again_with_the_same_bytes_is_a_success_that_says_so(store):
    store.put("a", b"x")
    assert store.put("a", b"x") is False


def test_create_with_other_bytes_is_refused_and_changes_nothing(store):
    store.put("a", b"x")
    with pytest.raises(AlreadyExistsError, match=r"a exists already under .* with other bytes"):
        store.put("a", b"y")
    assert store.get("a") == b"x"


def test_overwrite_replaces(store):
    store.put("a", b"x")
    assert store.put("a", b"yy", mode="overwrite") is True
    assert store.get("a") == b"yy"


def test_one_of_many_creators_wins(store):
    def create(n):
        try:
            return store.put("k/race", b"%d" % n)
        except AlreadyExistsError:
            return None

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(create, range(16)))
    assert outcomes.count(True) == 1
    assert store.get("k/race") == b"%d" % outcomes.index(True)


def test_put_content_names_the_file_by_its_digest(store):
    stored = store.put_content("d/shard-00000-", ".npy", [b"ab", b"c"])
    digest = hashlib.sha256(b"abc").hexdigest()
    assert (stored.key, stored.bytes, stored.sha256) == (
        f"d/shard-00000-{digest[:16]}.npy",
        3,
        digest,
    )
    assert store.get(stored.key) == b"abc"


def test_put_content_heals_a_damaged_file_of_the_same_name(store):
    stored = store.put_content("d/s-", ".npy", b"abc")
    store.put(stored.key, b"xx", mode="overwrite")
    store.put_content("d/s-", ".npy", b"abc")
    assert store.get(stored.key) == b"abc"


def test_missing_objects(store):
    with pytest.raises(NotFoundError, match="no a/b under") as error:
        store.get("a/b")
    assert error.value.code == "object_not_found"
    with pytest.raises(NotFoundError, match="no a/b under"):
        store.open("a/b")
    assert store.size("a/b") is None
    store.put("file", b"x")
    assert store.size("file/below") is None
    store.delete("a/b")


def test_delete_removes(store):
    store.put("a", b"x")
    store.delete("a")
    assert store.size("a") is None


def test_list_is_sorted_recursive_and_keeps_to_the_folder(store):
    for key in ("d/x/2", "d/x/10", "d/a", "dx/other"):
        store.put(key, key.encode())
    assert store.list("d") == [("d/a", 3), ("d/x/10", 6), ("d/x/2", 5)]
    assert store.list("nothing") == []


@pytest.mark.parametrize(
    "key", ["../x", "/x", "a//b", "a/./b", "a/../../b", "a\\b", "", "a/", "\0"]
)
def test_keys_that_are_not_plain_are_refused(store, key):
    calls = (
        lambda: store.put(key, b"x"),
        lambda: store.get(key),
        lambda: store.open(key),
        lambda: store.size(key),
        lambda: store.delete(key),
        lambda: store.local_path(key),
    )
    for call in calls:
        with pytest.raises(IntegrityError, match="expected a relative name") as error:
            call()
        assert error.value.code == "name_invalid"


def test_probe_finds_create_only_and_leaves_nothing(store):
    store.put("folder/other", b"x")
    probe = store.probe()
    assert (probe.writable, probe.create_only) == (True, True)
    assert "create-only honoured" in probe.detail


def test_local_path_only_where_files_are(store, root):
    path = store.local_path("a/b")
    assert path is None if root.startswith("memory") else path == Path(root).resolve() / "a/b"


def test_the_same_memory_uri_is_the_same_store():
    open_store("memory://shared-name").put("a", b"x")
    assert open_store("memory://shared-name").get("a") == b"x"
    assert open_store("memory://other-name").size("a") is None


def test_opening_touches_nothing(tmp_path):
    store = open_store(f"file://{tmp_path}/not-yet")
    assert store.list("datasets") == []
    assert not (tmp_path / "not-yet").exists()


def test_an_open_store_is_passed_through(store):
    assert open_store(store) is store


def test_unknown_scheme_is_refused():
    with pytest.raises(InvalidInputError, match="found scheme 'ftp'"):
        open_store("ftp://x")


def test_a_root_that_is_a_file_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    store = open_store(tmp_path / "file")
    with pytest.raises(StorageError, match=r"could not write a under .*: Not a directory"):
        store.put("a", b"x")
    assert store.probe().writable is False

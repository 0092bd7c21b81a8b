"""The store contract: every backend passes all of it."""

from __future__ import annotations

import hashlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from tests.servers import stores
from wllm_ray.dataset.stores.store import Store, open_store
from wllm_ray.errors import (
    AlreadyExistsError,
    IntegrityError,
    InvalidInputError,
    NotFoundError,
    StorageError,
)

pytestmark = pytest.mark.requirement("D-1", "D-4")

_names = itertools.count()


@pytest.fixture(params=["local", "memory", "s3", "az"])
def root(request, tmp_path, monkeypatch):
    """Every backend that a server can be had for; gs:// has none, so it is not claimed here."""
    if request.param == "local":
        return str(tmp_path / "root")
    if request.param == "memory":
        return f"memory://contract-{next(_names)}"
    server = {"s3": "moto", "az": "azurite"}[request.param]
    for name, value in request.getfixturevalue(server).items():
        monkeypatch.setenv(name, value)
    return f"{request.param}://{stores.BUCKET}/contract-{next(_names)}"


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


def test_put_content_of_several_parts(store):
    """Larger than one part of an upload, in buffers that are cut elsewhere, and one of no bytes."""
    array = np.arange(5 << 20, dtype=np.uint32)
    data = [b"head", array[:1000].data, memoryview(b""), array[1000:].reshape(-1, 10, 4).data]
    stored = store.put_content("d/s-", ".npy", data)
    whole = b"head" + array.tobytes()
    assert (stored.bytes, stored.sha256) == (len(whole), hashlib.sha256(whole).hexdigest())
    assert store.size(stored.key) == len(whole)
    assert store.get(stored.key) == whole


def test_ranges_are_exactly_what_was_asked_for(store):
    data = bytes(range(256)) * 5000
    store.put("a/b", data)
    asked = [(1_000_000, 1_000_010), (0, 3), (3, 3), (2, 700_000), (0, len(data))]
    found = store.get_ranges("a/b", asked)
    assert [bytes(part) for part in found] == [data[start:stop] for start, stop in asked]
    assert all(part.readonly for part in found)
    assert np.frombuffer(found[1], np.uint8).tolist() == [0, 1, 2]
    assert store.get_range("a/b", 5, 9) == data[5:9]
    assert store.get_ranges("a/b", []) == []


@pytest.mark.parametrize("asked", [(0, 4), (2, 4), (3, 5), (7, 9), (0, 1 << 60)])
def test_a_range_past_the_end_is_an_error_and_never_short(store, asked):
    store.put("a/b", b"xyz")
    with pytest.raises(StorageError, match="could not read a/b under"):
        store.get_range("a/b", *asked)
    with pytest.raises(StorageError, match="could not read a/b under"):
        store.get_ranges("a/b", [(0, 1), asked])


@pytest.mark.parametrize("asked", [(-1, 2), (3, 2)])
def test_a_range_that_is_none_is_refused(store, asked):
    store.put("a/b", b"xyz")
    with pytest.raises(InvalidInputError, match="a/b: a range runs from 0") as error:
        store.get_range("a/b", *asked)
    assert error.value.code == "invalid_argument"


def test_the_time_of_writing(store):
    before = datetime.now(UTC)
    store.put("a", b"x")
    # Stores keep whole seconds.
    assert abs((store.modified("a") - before).total_seconds()) < 60
    assert store.modified("b") is None


def test_an_object_that_is_too_large_is_not_read(store):
    store.put("d/a", b"12345")
    assert store.get("d/a", most_bytes=5) == b"12345"
    with pytest.raises(IntegrityError, match="d/a: expected a document of at most 4 b") as error:
        store.get("d/a", most_bytes=4)
    assert error.value.code == "manifest_invalid"


def test_missing_objects(store):
    with pytest.raises(NotFoundError, match="no a/b under") as error:
        store.get("a/b")
    assert error.value.code == "object_not_found"
    for read in (
        lambda: store.open("a/b"),
        lambda: store.get_range("a/b", 0, 1),
        lambda: store.get_ranges("a/b", [(0, 1), (5, 6)]),
    ):
        with pytest.raises(NotFoundError, match="no a/b under"):
            read()
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
        lambda: store.get_range(key, 0, 1),
        lambda: store.put_content(f"{key}/", "", b"x"),
        lambda: store.size(key),
        lambda: store.delete(key),
        lambda: store.local_path(key),
    )
    for call in calls:
        with pytest.raises(IntegrityError, match="expected a relative name") as error:
            call()
        assert error.value.code == "name_invalid"


def test_probe_finds_create_only(store):
    probe = store.probe()
    assert (probe.writable, probe.create_only) == (True, True)
    assert "create-only honoured" in probe.detail


def test_local_path_only_where_files_are(store, root):
    path = store.local_path("a/b")
    assert path is None if "://" in root else path == Path(root).resolve() / "a/b"


def test_an_open_store_is_passed_through(store):
    assert open_store(store) is store

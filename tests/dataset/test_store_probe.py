"""The probe finds out what a root cannot do, and a root for one writer is refused to several."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from dataset_builders import capture, make_rows, make_spec, rows_of, write_dataset

from tests.servers import stores
from wllm_ray.dataset.reading.verify import verify_dataset
from wllm_ray.dataset.stores.probing import expect_create_only
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.dataset.writing.writer import create_spec, stage_shard
from wllm_ray.errors import AlreadyExistsError, ConflictError, StorageError

pytestmark = pytest.mark.requirement("D-4")


def test_a_server_that_ignores_conditions_is_found_out(s3rver, monkeypatch):
    for name, value in s3rver.items():
        monkeypatch.setenv(name, value)
    store = open_store(f"s3://{stores.BUCKET}/probed")
    probe = store.probe()
    assert (probe.writable, probe.create_only) == (True, False)
    assert probe.detail == "create-only is not honoured"
    assert open_store(f"s3://{stores.BUCKET}").list("probed") == []
    with pytest.raises(ConflictError, match="does not honour create-only writes") as error:
        expect_create_only(store)
    assert error.value.code == "single_writer_root"


def test_one_writer_on_a_root_that_ignores_conditions_changes_nothing_that_stands(
    s3rver, monkeypatch
):
    """Another request under the id of a committed dataset is refused, and does not replace it."""
    for name, value in s3rver.items():
        monkeypatch.setenv(name, value)
    store = open_store(f"s3://{stores.BUCKET}/one-writer")
    rows = make_rows(4)
    spec = make_spec(rows)
    write_dataset(store, rows)
    other = make_spec(rows, position="first")
    with pytest.raises(ConflictError, match="field position") as error:
        create_spec(store, other)
    assert error.value.code == "dataset_immutable"
    part = rows_of(spec, rows, 0)
    again = capture(part, spec, features={0: np.full((1, 4), 7, np.float32)})
    assert stage_shard(store, spec, 0, part, [again]).superseded
    assert verify_dataset(store, "d").ok


def test_a_good_root_is_left_as_it_was(s3_root):
    for root in ("memory://probed", s3_root):
        store = open_store(root)
        expect_create_only(store)
        base, _, folder = s3_root.rpartition("/")
        assert open_store(base).list(folder) == []


class Remembering:
    """A root in memory that is told how to fail."""

    uri = "test://root"

    def __init__(self, *, refuses_later=True, refuses_at_once=True, returns=None, fails_on=()):
        self._refuses_later, self._refuses_at_once = refuses_later, refuses_at_once
        self._returns, self._fails_on = returns, fails_on
        self._both_looked = threading.Barrier(2)
        self.objects = {}

    def put(self, key, data):
        self._fail("put")
        is_there = key in self.objects
        if data != b"later" and not self._refuses_at_once:
            self._both_looked.wait()
        if is_there and self._refuses_later:
            raise AlreadyExistsError("there")
        self.objects[key] = data
        return True

    def get(self, key, *, most_bytes=None):
        self._fail("get")
        return self.objects[key] if self._returns is None else self._returns

    def delete(self, key):
        self._fail("delete")
        self.objects.pop(key, None)

    def probe(self):
        from wllm_ray.dataset.stores.probing import probe_store

        return probe_store(self)

    def _fail(self, name):
        if name in self._fails_on:
            raise StorageError(f"could not {name}")


def test_two_writers_that_both_win_are_found_out():
    """Each looks, and then both write: one after the other it would have been refused."""
    store = Remembering(refuses_at_once=False)
    probe = store.probe()
    assert (probe.writable, probe.create_only) == (True, False)
    assert not store.objects


def test_a_later_write_that_wins_is_found_out():
    probe = Remembering(refuses_later=False).probe()
    assert (probe.writable, probe.create_only) == (True, False)


@pytest.mark.parametrize("failing", [["put", "delete"], ["get"], ["get", "delete"], ["delete"]])
def test_a_root_that_fails_is_not_writable_and_the_first_failure_is_told(failing):
    store = Remembering(fails_on=failing)
    assert store.probe().detail == f"could not {failing[0]}"
    with pytest.raises(StorageError, match=f"cannot be used: could not {failing[0]}"):
        expect_create_only(store)
    assert bool(store.objects) == ("delete" in failing and "put" not in failing)


def test_a_root_that_returns_other_bytes_is_not_writable():
    probe = Remembering(returns=b"else").probe()
    assert (probe.writable, probe.detail) == (False, "it returns other bytes")


def test_a_missing_bucket_is_named(s3_root):
    probe = open_store("s3://nowhere/x").probe()
    assert not probe.writable
    assert "there is no such bucket or container" in probe.detail

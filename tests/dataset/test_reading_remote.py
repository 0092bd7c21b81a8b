"""What is fetched from a storage root that cannot be mapped, when, and what it costs."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import pickle
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from dataset_builders import make_rows, write_dataset
from reading_builders import DTYPES, Recording, write_exact

from wllm_ray.dataset.format.layout import folder
from wllm_ray.dataset.reading import files as files_module
from wllm_ray.dataset.reading import ranged
from wllm_ray.dataset.reading.cache import BoundedCache
from wllm_ray.dataset.reading.files import DatasetFiles
from wllm_ray.dataset.reading.ranged import RangedFile
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.errors import IntegrityError, NotOfferedError, StorageError

pytestmark = pytest.mark.requirement("P-4", "D-6")

SITES = ("L0_resid_post", "L2_mlp_out")
WIDTH = 1024


@pytest.fixture
def memory(request):
    return Recording(open_store(f"memory://{request.node.name}"))


@pytest.fixture
def rows():
    return make_rows(60, failed=[1])


def keep_at_most(monkeypatch, most):
    monkeypatch.setattr(files_module, "KEPT_BYTES", most)


def entry_of(dataset, shard):
    return dataset.manifest.shards[shard].features_files[0]


def test_opening_fetches_the_manifest_alone(memory, rows):
    write_dataset(memory, rows)
    memory.forget()
    dataset = load_dataset(memory, "d")
    assert [name for name, _ in memory.whole] == ["manifest.json"]
    assert (len(dataset), dataset.manifest.shape, memory.ranges) == (59, (59, 1, 4), [])


def test_first_access_checks_a_shard_whole_and_keeps_it(memory, rows):
    (expected,) = write_exact(memory, rows, per_shard=20)
    dataset = load_dataset(memory, "d")
    ids = dataset.row_ids
    memory.forget()
    for _ in range(3):
        assert np.array_equal(dataset.select(ids[20:22]).features, expected[20:22])
    assert (memory.shards, memory.ranges) == ([1], [])
    assert np.array_equal(np.concatenate([b.features for b in dataset.iter_batches(7)]), expected)
    assert memory.shards == [1, 0, 2]


@pytest.mark.parametrize(
    ("dtype", "shard_format", "layout"),
    list(product(DTYPES, ["npy", "arrow"], ["stacked", "per_site"])),
)
def test_what_was_checked_and_dropped_is_read_by_ranges(  # noqa: PLR0917 (a product)
    memory, rows, monkeypatch, dtype, shard_format, layout
):
    options = {"shard_format": shard_format, "shard_layout": layout, "per_shard": 30}
    parts = write_exact(
        memory, rows, dtype=dtype, sites=SITES, site_widths=(WIDTH, WIDTH), **options
    )
    manifest = load_dataset(memory, "d").manifest
    files = 1 if layout == "stacked" else 2
    keep_at_most(monkeypatch, files * manifest.shards[1].features_files[0].bytes + 24576)
    dataset = load_dataset(memory, "d")
    assert np.array_equal(next(dataset.iter_batches(99)).features, np.stack(parts, axis=1))
    assert memory.shards == [0] * files + [1] * files  # the last one is kept, the first is not
    first, last = dataset.row_ids[3], dataset.row_ids[-1]
    memory.forget()
    both = dataset.select([last, first, last], site=SITES[1])
    assert np.array_equal(both.features, parts[1][[-1, 3, -1]])
    assert memory.shards == []
    ends = 2 * ranged._ARROW_FRAME_BYTES + 4096
    row = WIDTH * np.dtype({"bfloat16": "u2"}.get(dtype, dtype)).itemsize
    assert row <= sum(size for _, size in memory.ranges) <= row + ends
    memory.forget()
    assert np.array_equal(dataset.select([first]).features[0], np.stack(parts, axis=1)[3])
    ends_of_other_site = ends if layout == "per_site" else 0
    assert sum(size for _, size in memory.ranges) <= 2 * row + ends_of_other_site


@pytest.mark.parametrize("shard_format", ["npy", "arrow"])
def test_unchecked_rows_are_read_by_ranges_from_the_start(memory, rows, shard_format):
    (expected,) = write_exact(
        memory, rows, site_widths=(WIDTH,), per_shard=99, shard_format=shard_format
    )
    dataset = load_dataset(memory, "d", verify="off")
    ids = dataset.row_ids
    memory.forget()
    wanted = [40, 7, 8, 9, 40]
    assert np.array_equal(dataset.select([ids[n] for n in wanted]).features, expected[wanted])
    assert memory.shards == []
    four_rows = 4 * 4 * WIDTH
    assert sum(size for _, size in memory.ranges) < four_rows + 12_000 < entry_of(dataset, 0).bytes
    # Whoever goes through all of it is better served by whole files.
    for shuffle in (True, False):
        found = list(dataset.iter_batches(16, shuffle=shuffle))
        rows_found = np.concatenate([batch.rows for batch in found])
        assert np.array_equal(np.concatenate([b.features for b in found]), expected[rows_found])
    assert memory.shards == [0]


@pytest.mark.parametrize("shard_format", ["npy", "arrow"])
def test_a_file_over_the_bound_is_checked_in_pieces_and_never_kept(
    memory, rows, monkeypatch, shard_format
):
    (expected,) = write_exact(
        memory, rows, site_widths=(WIDTH,), per_shard=30, shard_format=shard_format
    )
    keep_at_most(monkeypatch, 1 << 16)
    monkeypatch.setattr(ranged, "_PIECE_BYTES", 1 << 14)
    dataset = load_dataset(memory, "d")
    assert np.array_equal(dataset.select([dataset.row_ids[40]]).features[0], expected[40])
    assert np.array_equal(dataset.features, expected)
    found = np.concatenate([batch.features for batch in dataset.iter_batches(8)])
    assert np.array_equal(found, expected)
    assert memory.shards == []
    damage(memory, dataset, 1)
    again = load_dataset(memory, "d")
    with pytest.raises(IntegrityError, match="expected SHA-256") as error:
        again.select([dataset.row_ids[40]])
    assert error.value.code == "digest_mismatch"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [None, 0, 999])
def test_the_pieces_of_a_file_tell_its_digest_and_whether_it_is_finite(
    memory, monkeypatch, dtype, bad
):
    monkeypatch.setattr(ranged, "_PIECE_BYTES", 64)
    kind = np.dtype({"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[dtype])
    values = np.ones(1000, kind)
    if bad is not None:
        values[bad] = 0x7F80 if dtype == "bfloat16" else np.inf
    data = b"head" + values.tobytes() + b"tail"
    memory.put("datasets/d/file", data)
    file = RangedFile(memory, "datasets/d/file", len(data), 4, 250, (4,), dtype)
    assert file.sha256_and_finite() == (hashlib.sha256(data).hexdigest(), bad is None)


def flipped(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


def damage(memory, dataset, shard, change=flipped):
    key = f"{folder('d')}/{entry_of(dataset, shard).name}"
    memory.put(key, change(memory.get(key)), mode="overwrite")
    memory.forget()


def test_what_is_kept_stays_within_the_bound(memory, rows, monkeypatch):
    write_exact(memory, rows, per_shard=10)
    size = load_dataset(memory, "d").manifest.shards[1].features_files[0].bytes
    keep_at_most(monkeypatch, 3 * size)
    files = load_dataset(memory, "d")._files
    for shard in (0, 1, 2, 0, 3):
        files.array(shard, 0)
    assert list(files.cache._kept) == [(2, 0), (0, 0), (3, 0)]
    assert files.cache._taken <= 3 * size


@pytest.mark.parametrize("verify", ["lazy", "off"])
@pytest.mark.parametrize("code", ["file_missing", "size_mismatch"])
def test_a_file_that_goes_or_shrinks_while_it_is_read(memory, rows, monkeypatch, verify, code):
    write_exact(memory, rows, site_widths=(WIDTH,), per_shard=30)
    keep_at_most(monkeypatch, 1 << 17)
    dataset = load_dataset(memory, "d", verify=verify)
    dataset.row_ids  # noqa: B018 (reads the tables)
    dataset.select(dataset.row_ids[-1:])
    for shard in (0, 1):
        if code == "size_mismatch":
            damage(memory, dataset, shard, lambda data: data[:-4])
        else:
            memory.delete(f"{folder('d')}/{entry_of(dataset, shard).name}")
    for read in (
        lambda: dataset.select(dataset.row_ids[:1]),
        lambda: dataset.features,
        lambda: list(dataset.iter_batches(4, shuffle=True)),
    ):
        with pytest.raises(IntegrityError) as error:
            read()
        assert error.value.code == code
        assert "datasets/d/shard-0000" in error.value.message


@pytest.mark.parametrize("shard_format", ["npy", "arrow"])
def test_a_header_that_lies_is_refused_without_the_rest(memory, rows, shard_format):
    write_exact(memory, rows, site_widths=(WIDTH,), per_shard=99, shard_format=shard_format)
    dataset = load_dataset(memory, "d", verify="off")
    damage(memory, dataset, 0, lambda data: data.replace(b"<f4", b">f4").replace(b"item", b"mite"))
    with pytest.raises(IntegrityError, match=r"expected (the \.npy header|an Arrow IPC)") as error:
        dataset.select(dataset.row_ids[:1])
    assert error.value.code == "array_invalid"
    assert memory.shards == []


# --- threads and processes ----------------------------------------------------------------------


def test_threads_fetch_unlike_shards_at_once_and_the_same_one_once(memory, rows):
    write_exact(memory, rows, per_shard=30)
    files = load_dataset(memory, "d")._files
    both_here = threading.Barrier(2, timeout=20)
    raw, fetched = files.raw, []

    def slow(entry):
        fetched.append(entry.name)
        both_here.wait()
        return raw(entry)

    files.raw = slow
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda shard: files.array(shard, 0), [0, 1] * 4))
    assert len(fetched) == 2
    assert found[0] is found[2]


def test_a_load_that_fails_is_tried_again_by_those_who_wait():
    cache, tries = BoundedCache(100), []
    failing = threading.Event()

    def load():
        tries.append(threading.get_ident())
        if len(tries) == 1:
            failing.wait(20)
            raise OSError("lost")
        return "value", 5

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(cache.get, "key", load)
        while not tries:
            time.sleep(0.001)
        second = pool.submit(cache.get, "key", load)
        failing.set()
        with pytest.raises(OSError, match="lost"):
            first.result()
        assert second.result() == "value"
    assert cache.get("key", load) == "value"
    assert len(tries) == 2


@pytest.mark.parametrize("shuffle", [False, True])
def test_many_threads_read_one_dataset(store, rows, shuffle):
    (expected,) = write_exact(store, rows, per_shard=7)
    dataset = load_dataset(store, "d")

    def read(seed):
        batches = list(dataset.iter_batches(5, shuffle=shuffle, seed=seed))
        found = np.concatenate([batch.features for batch in batches])
        return np.array_equal(found, expected[np.concatenate([b.rows for b in batches])])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(24)))


def test_a_forked_process_reads_although_its_parent_was_reading(local, rows):
    (expected,) = write_exact(local, rows)
    dataset = load_dataset(local, "d")
    dataset._files.cache._lock.acquire()  # as a thread does that is not forked

    assert in_a_fork(lambda: np.array_equal(dataset.features, expected))


def test_a_forked_process_opens_shards_that_its_parent_was_opening(local, rows, monkeypatch):
    """Two threads at once, one of which is forked away while the other is in the middle of it."""
    (expected,) = write_exact(local, rows, per_shard=10)
    dataset = load_dataset(local, "d")
    opening, forked = threading.Event(), threading.Event()
    array = DatasetFiles.array

    def slowly(files, shard, number):
        found = array(files, shard, number)
        if shard == 1 and not forked.is_set():
            opening.set()
            assert forked.wait(20)
        return found

    monkeypatch.setattr(DatasetFiles, "array", slowly)
    ids = dataset.row_ids

    def read():
        return np.array_equal(dataset.select(ids[5:25]).features, expected[5:25])

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: dataset.select(ids[10:12]).features)
        assert opening.wait(20)
        monkeypatch.setattr(DatasetFiles, "array", array)
        assert in_a_fork(read)
        assert read()
        forked.set()
        assert np.array_equal(reading.result(), expected[10:12])
    assert read()


def test_a_forked_process_reads_one_dataset_while_its_parent_opens_another(
    local, rows, monkeypatch
):
    """What a class keeps for all datasets must not be held by a thread that is forked away."""
    (expected,) = write_exact(local, rows)
    one, other = load_dataset(local, "d"), load_dataset(local, "d")
    opening, forked = threading.Event(), threading.Event()
    array = DatasetFiles.array

    def slowly(files, shard, number):
        if files is one._files:
            opening.set()
            assert forked.wait(30)
        return array(files, shard, number)

    monkeypatch.setattr(DatasetFiles, "array", slowly)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: one.features)
        assert opening.wait(20)
        try:
            assert in_a_fork(lambda: np.array_equal(other.features, expected))
            assert np.array_equal(other.features, expected), "nor do two datasets wait here"
        finally:
            forked.set()
        assert np.array_equal(reading.result(), expected)


def test_a_pickled_dataset_is_the_same_one_and_knows_what_was_checked(local, rows):
    (expected,) = write_exact(local, rows, per_shard=30)
    dataset = load_dataset(local, "d")
    dataset.select(dataset.row_ids[:1])
    assert np.array_equal(dataset.features_3d[:, 0], expected)
    data = pickle.dumps(dataset)
    assert len(data) < 20_000  # the manifest, no feature and no id
    again = pickle.loads(data)
    assert again.manifest == dataset.manifest
    assert not again._files.is_unchecked(entry_of(again, 0))
    assert np.array_equal(again.features, expected)
    batch = pickle.loads(pickle.dumps(dataset.select(dataset.row_ids[3:5])))
    assert (batch.row_ids, batch.rows.tolist()) == (dataset.row_ids[3:5], [3, 4])


def test_a_dataset_in_memory_cannot_be_pickled(memory, rows):
    write_exact(memory, rows)
    with pytest.raises(NotOfferedError, match="lies in the memory of this process") as error:
        pickle.dumps(load_dataset(memory, "d"))
    assert error.value.code == "feature_not_offered"


def test_an_object_store_is_not_read_in_a_forked_process(s3_root, rows):
    """Its client would wait for ever there."""
    (expected,) = write_exact(open_store(s3_root), rows, per_shard=30)
    dataset = load_dataset(s3_root, "d")
    assert np.array_equal(dataset.select(dataset.row_ids[:1]).features[0], expected[0])
    with pytest.raises(StorageError, match=r"was forked from .*_context='spawn'"):
        in_a_fork(lambda: dataset.select(dataset.row_ids[-1:]))
    again = pickle.loads(pickle.dumps(dataset))
    assert b"S3RVER" not in pickle.dumps(dataset)
    assert np.array_equal(again.features, expected)


def in_a_fork(call):
    """What a call returns in a forked child, or raises."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def run():
        try:
            theirs.send((call(), None))
        except StorageError as error:
            theirs.send((None, error))

    child = fork.Process(target=run, daemon=True)
    child.start()
    assert ours.poll(30), "the child waits for ever"
    result, error = ours.recv()
    child.join()
    if error:
        raise error
    return result


def test_an_unreadable_table_fails_before_a_feature_is_fetched(local, rows):
    write_exact(local, rows)
    dataset = load_dataset(local, "d")
    table = Path(local.uri) / folder("d") / dataset.manifest.shards[0].rows_file.name
    os.truncate(table, 0)
    with pytest.raises(IntegrityError, match=r"expected \d+ bytes, found 0") as error:
        next(dataset.iter_batches(4))
    assert error.value.code == "size_mismatch"

"""Local files as memory: how many at once, and what cannot be read at all."""

from __future__ import annotations

import errno
import os
import resource
import stat
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from dataset_builders import make_rows, write_dataset
from reading_builders import write_exact

from wllm_ray.dataset.reading import files as files_module
from wllm_ray.dataset.reading import maps
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.reading.staged import load_spec, staged_shards
from wllm_ray.dataset.reading.verify import verify_dataset
from wllm_ray.dataset.tools.merge import merge_datasets
from wllm_ray.errors import IntegrityError, StorageError

pytestmark = pytest.mark.requirement("P-4")

SITES = ("L0_resid_post", "L2_mlp_out")
MOST = 8


def folder(store):
    return Path(store.uri) / "datasets" / "d"


def maps_now():
    """Features files that are mapped in this process."""
    return Path("/proc/self/maps").read_text().count(".npy")


def every_way(dataset, parts):
    """Read in every way, and compare; yields after each."""
    expected = np.stack(parts, axis=1)
    for site, wanted in ((None, expected), *zip(SITES, parts, strict=True)):
        assert np.array_equal(dataset.features if site is None else dataset.site(site), wanted)
        yield
        for shuffle in (False, True):
            for batch in dataset.iter_batches(7, site=site, shuffle=shuffle):
                assert np.array_equal(batch.features, wanted[batch.rows])
                yield
        ids = dataset.row_ids[::-5]
        assert np.array_equal(dataset.select(ids, site=site).features, wanted[::-5])
        yield


@pytest.mark.parametrize("layout", ["stacked", "per_site"])
def test_only_so_many_files_are_mapped_at_once(local, monkeypatch, layout):
    """A process may have some 65,000 maps, and a dataset may have more files."""
    monkeypatch.setattr(maps, "MAPPED_FROM", 1)
    monkeypatch.setattr(maps, "MOST_MAPS", MOST)
    parts = write_exact(local, make_rows(20), sites=SITES, shard_layout=layout, per_shard=1)
    before, most = maps_now(), 0
    for _ in every_way(load_dataset(local, "d"), parts):
        most = max(most, maps_now() - before)
    assert most == MOST


def test_rows_are_picked_out_of_all_files_at_once_where_all_may_be_mapped(local, monkeypatch):
    monkeypatch.setattr(maps, "MAPPED_FROM", 1)
    monkeypatch.setattr(maps, "MOST_MAPS", MOST)
    write_exact(local, make_rows(MOST), per_shard=1)
    assert load_dataset(local, "d")._files.stay_in_place
    monkeypatch.setattr(maps, "MOST_MAPS", MOST - 1)
    assert not load_dataset(local, "d")._files.stay_in_place


def test_small_files_are_read_and_kept_within_the_bound(local, monkeypatch):
    parts = write_exact(local, make_rows(20), sites=SITES, per_shard=1)
    dataset = load_dataset(local, "d")
    size = dataset.manifest.shards[0].features_files[0].bytes
    before = maps_now()
    assert size < maps.MAPPED_FROM
    assert sum(1 for _ in every_way(dataset, parts)) > 9
    assert dataset._files.stay_in_place
    monkeypatch.setattr(files_module, "KEPT_BYTES", 3 * size)
    narrow = load_dataset(local, "d")
    for _ in every_way(narrow, parts):
        assert sum((shard, 0) in narrow._files.cache for shard in range(20)) <= 3
    assert not narrow._files.stay_in_place
    assert maps_now() == before


READS = {
    "features": lambda dataset: dataset.features,
    "row_ids": lambda dataset: dataset.row_ids,
    "batches": lambda dataset: list(dataset.iter_batches(4, shuffle=True)),
    "tensor": lambda dataset: dataset.to_torch(),
    "staged": lambda dataset: staged_shards(
        dataset._files.store, load_spec(dataset._files.store, "d")
    ),
    "merge": lambda dataset: merge_datasets(dataset._files.store, ["d"], "e"),
}


@pytest.fixture
def dataset(local):
    write_dataset(local, make_rows(9))
    return load_dataset(local, "d")


@pytest.fixture
def deny(monkeypatch):
    """Have the system refuse to open a file; the superuser is refused nothing otherwise."""
    is_refused = set()
    failure = []

    def guarded(real):
        def opened(path, *args, **options):
            if Path(str(path)).name in is_refused:
                raise OSError(failure[0], os.strerror(failure[0]), str(path))
            return real(path, *args, **options)

        return opened

    monkeypatch.setattr(os, "open", guarded(os.open))
    monkeypatch.setattr(Path, "open", guarded(Path.open))

    def deny(number, *names):
        failure.append(number)
        is_refused.update(names)

    return deny


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize(
    ("number", "advice"), [(errno.EACCES, "permissions"), (errno.EMFILE, "ulimit -n")]
)
def test_a_file_that_cannot_be_opened_is_named(dataset, deny, read, number, advice):
    shard = dataset.manifest.shards[1]
    names = [entry.name for entry in shard.files]
    deny(number, *names)
    with pytest.raises(StorageError) as error:
        READS[read](dataset)
    assert error.value.code == "storage_failed"
    assert any(name in error.value.message for name in names)
    assert os.strerror(number) in error.value.message
    assert advice in error.value.message


def test_verify_lists_what_cannot_be_opened_beside_what_is_damaged(local, dataset, deny):
    table = dataset.manifest.shards[0].rows_file.name
    (array,) = (entry.name for entry in dataset.manifest.shards[1].features_files)
    damaged = folder(local) / dataset.manifest.shards[2].rows_file.name
    damaged.write_bytes(bytes(damaged.stat().st_size))
    deny(errno.EACCES, table, array)
    faults = verify_dataset(local, "d").faults
    assert [(fault.code, fault.file) for fault in faults] == [
        ("storage_failed", table),
        ("storage_failed", array),
        ("digest_mismatch", damaged.name),
    ]


PLACES = {
    "a socket": lambda path: os.mknod(path, stat.S_IFSOCK | 0o600),
    "a pipe": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a folder": Path.mkdir,
    "nothing": lambda path: None,
}


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_no_regular_file_is_no_file(local, dataset, read, place):
    for entry in dataset.manifest.shards[1].files:
        path = folder(local) / entry.name
        path.unlink()
        PLACES[place](path)
    with pytest.raises(IntegrityError, match="it is missing") as error:
        READS[read](dataset)
    assert error.value.code == "file_missing"
    assert {fault.code for fault in verify_dataset(local, "d").faults} == {"file_missing"}


@pytest.mark.requirement("D-6")
@pytest.mark.parametrize("read", [read for read in READS if read != "staged"])  # maps nothing
def test_a_link_that_takes_the_place_of_a_file_meanwhile_is_not_followed(
    local, dataset, tmp_path, monkeypatch, read
):
    """After it was found to lead nowhere else, and before it is opened."""
    names = {entry.name for entry in dataset.manifest.shards[1].files}
    real = type(local).local_path

    def local_path(store, key):
        path = real(store, key)
        if path is not None and path.name in names and not path.is_symlink():
            # The very same bytes, so that nothing but the link is wrong.
            path.rename(tmp_path / path.name)
            path.symlink_to(tmp_path / path.name)
        return path

    monkeypatch.setattr(type(local), "local_path", local_path)
    with pytest.raises(IntegrityError, match="it is missing") as error:
        READS[read](load_dataset(local, "d"))
    assert error.value.code == "file_missing"


@pytest.mark.requirement("D-6")
@pytest.mark.parametrize("mapped", [maps.map_file, maps.map_privately])
@pytest.mark.parametrize("size", [5, maps.MAPPED_FROM])
def test_no_link_is_mapped(tmp_path, mapped, size):
    (tmp_path / "file").write_bytes(b"x" * size)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert mapped(tmp_path / "file").size == size
    assert mapped(tmp_path / "link") is None


def test_a_map_that_fails_says_what_to_do(dataset, monkeypatch):
    """As where other libraries have mapped so many files that none is left."""
    monkeypatch.setattr(maps, "MAPPED_FROM", 1)

    def failing(name):
        raise OSError(errno.ENOMEM, "Memory mapping file failed: Cannot allocate memory")

    monkeypatch.setattr(pa, "memory_map", failing)
    with pytest.raises(StorageError, match=r"shard-0.*Cannot allocate memory.*max_map_count"):
        dataset.site("L1_resid_post")


def test_arrow_says_why_a_map_fails(tmp_path):
    """The advice goes by the system's words, which Arrow passes on."""
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 39, limits[1]))
    try:
        with pytest.raises(StorageError, match="max_map_count"):
            maps.map_file(path)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)

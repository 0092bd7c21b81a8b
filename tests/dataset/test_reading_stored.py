"""What readers get of each way to store a dataset: numbers, dtypes, no copy where none is due."""

from __future__ import annotations

import resource
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from dataset_builders import make_rows, write_dataset
from reading_builders import write_exact

from wllm_ray.dataset.format.manifest import TraceSpec
from wllm_ray.dataset.reading import maps
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.errors import IntegrityError, InvalidInputError, NotOfferedError

pytestmark = pytest.mark.requirement("P-4")

SITES = ("L0_resid_post", "L2_mlp_out")
NUMPY = {"float32": np.float32, "bfloat16": np.uint16, "float16": np.float16}
FORMATS = list(product(NUMPY, ["npy", "arrow"], ["stacked", "per_site"]))
PER_SHARD = [99, 3]


def widened(stored, dtype):
    """By hand: the 16 bits of a bfloat16 are the upper half of a float32."""
    if dtype != "bfloat16":
        return stored.astype(np.float32)
    return (stored.astype(np.uint32) * 65536).view(np.float32)


@pytest.mark.parametrize("per_shard", PER_SHARD)
@pytest.mark.parametrize(("dtype", "shard_format", "layout"), FORMATS)
def test_every_way_to_store_gives_the_same_numbers(store, dtype, shard_format, layout, per_shard):
    torch = pytest.importorskip("torch")
    rows = make_rows(10, failed=[1, 6], sites=SITES)
    options = {"shard_format": shard_format, "shard_layout": layout, "per_shard": per_shard}
    parts = write_exact(store, rows, dtype=dtype, sites=SITES, position="all_prompt", **options)
    expected = np.stack(parts, axis=1)
    dataset = load_dataset(store, "d")
    order = np.random.default_rng(1).permutation(len(expected))
    picked = [row.id for row in rows[7:4:-1] if row.failure is None]
    for site, wanted in ((None, expected), *zip(SITES, parts, strict=True)):
        found = dataset.features if site is None else dataset.site(site)
        assert found.dtype == np.float32
        assert np.array_equal(found, wanted)
        assert np.array_equal(dataset.site(SITES[1]), parts[1])
        for shuffle, every in ((False, wanted), (True, wanted[order])):
            batches = list(dataset.iter_batches(4, site=site, shuffle=shuffle, seed=1))
            assert {batch.features.dtype for batch in batches} == {np.dtype(np.float32)}
            assert np.array_equal(np.concatenate([b.features for b in batches]), every)
        selection = dataset.select(picked, site=site)
        assert np.array_equal(selection.features, wanted[of_rows(dataset, picked)])
        stored = dataset.stored(site)
        assert stored.dtype == NUMPY[dtype]
        assert np.array_equal(widened(stored, dtype), wanted)
        tensor = dataset.to_torch(site=site)
        assert tensor.dtype == getattr(torch, dtype)
        assert np.array_equal(tensor.float().numpy(), wanted)
    table = dataset.to_arrow()
    for site, wanted in zip(SITES, parts, strict=True):
        values = table[site].combine_chunks().flatten().flatten()
        assert np.array_equal(values.to_numpy(), wanted.reshape(-1))


def of_rows(dataset, ids):
    starts = [dataset.row_ids.index(row_id) for row_id in ids]
    spans = [np.arange(dataset.offsets[row], dataset.offsets[row + 1]) for row in starts]
    return np.concatenate(spans)


@pytest.mark.parametrize(("dtype", "shard_format", "layout"), FORMATS)
def test_what_one_local_file_holds_is_never_copied(local, dtype, shard_format, layout):
    torch = pytest.importorskip("torch")
    rows = make_rows(10)
    options = {"shard_format": shard_format, "shard_layout": layout, "per_shard": 99}
    (expected,) = write_exact(local, rows, dtype=dtype, **options)
    dataset = load_dataset(local, "d")
    stored = dataset.stored()
    assert np.shares_memory(stored, dataset.stored("L1_resid_post"))
    if dtype == "float32":
        assert np.shares_memory(stored, dataset.features)
        assert np.shares_memory(stored, next(dataset.iter_batches(4)).features)
        column = dataset.to_arrow()["L1_resid_post"].chunk(0)
        assert column.values.buffers()[1].address == stored.ctypes.data
    tensor = dataset.to_torch()
    assert lies_in_a_file(tensor.data_ptr(), dataset)
    tensor *= 2  # private memory: neither the file nor the dataset sees it
    assert np.array_equal(tensor.float().numpy(), 2 * expected)
    assert np.array_equal(widened(stored, dtype), expected)
    assert dataset.verify().ok
    assert tensor.dtype == getattr(torch, dtype)


def lies_in_a_file(address, dataset):
    name = dataset.manifest.shards[0].features_files[0].name
    maps = Path("/proc/self/maps").read_text().splitlines()
    spans = [line.split()[0].split("-") for line in maps if name in line]
    return any(int(start, 16) <= address < int(stop, 16) for start, stop in spans)


def test_stored_arrays_are_read_only(store):
    for per_shard in PER_SHARD:
        dataset_id = f"d{per_shard}"
        write_exact(store, make_rows(6), dataset_id=dataset_id, per_shard=per_shard)
        with pytest.raises(ValueError, match="read-only"):
            load_dataset(store, dataset_id).stored()[0] = 0


def test_a_dataset_may_have_more_files_than_a_process_may_open(local, monkeypatch):
    """A map that kept its descriptor would end a dataset of millions of rows."""
    monkeypatch.setattr(maps, "MAPPED_FROM", 1)
    rows = make_rows(90)
    expected = write_exact(local, rows, per_shard=1)[0]
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    dataset = load_dataset(local, "d")
    few = len(list(Path("/proc/self/fd").iterdir())) + 20
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, limits[1]))
    try:
        assert np.array_equal(dataset.features, expected)
        shuffled = list(dataset.iter_batches(90, shuffle=True))
        assert len(dataset.row_ids) == 90
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert np.array_equal(shuffled[0].features, expected[shuffled[0].rows])


@pytest.mark.requirement("D-6")
def test_a_value_that_is_refused_stays_refused(local):
    """The digest is right, so a second look must not take the file for checked."""
    rows = make_rows(3)
    write_dataset(local, rows)
    dataset = load_dataset(local, "d")
    entry = dataset.manifest.shards[0].features_files[0]
    for _ in range(2):
        with pytest.raises(IntegrityError, match="NaN or infinity") as error:
            dataset._files.expect_sound(entry, entry.sha256, finite=False)
        assert error.value.code == "values_not_finite"
        assert dataset._files.is_unchecked(entry)


# --- where a feature row comes from -------------------------------------------------------------


@pytest.mark.parametrize("position", ["last_prompt", "all_prompt", "mean_prompt", "index:1,0"])
@pytest.mark.parametrize("size", [1, 5, 100])
def test_every_feature_row_knows_its_row_and_its_place_in_it(store, position, size):
    rows = make_rows(14, failed=[1, 7, 8, 9])
    write_exact(store, rows, position=position)
    dataset = load_dataset(store, "d")
    lengths = np.diff(dataset.offsets)
    row = np.repeat(np.arange(len(dataset)), lengths)
    index = np.concatenate([np.arange(length) for length in lengths])
    for order in (None, np.random.default_rng(3).permutation(len(row))):
        batches = list(dataset.iter_batches(size, shuffle=order is not None, seed=3))
        places = np.arange(len(row)) if order is None else order
        assert [one for b in batches for one in b.rows.tolist()] == row[places].tolist()
        assert [one for b in batches for one in b.index_in_row.tolist()] == index[places].tolist()
        ids = [one for b in batches for one in b.row_ids]
        assert ids == [dataset.row_ids[one] for one in row[places]]
        assert all(len(b) == len(b.features) == len(b.row_ids) for b in batches)
    last = dataset.select([dataset.row_ids[-1]])
    assert last.rows.tolist() == [len(dataset) - 1] * lengths[-1]
    assert last.index_in_row.tolist() == list(range(lengths[-1]))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_short_last_batch_can_be_left_out(store, shuffle):
    write_exact(store, make_rows(10))
    dataset = load_dataset(store, "d")
    every = list(dataset.iter_batches(4, shuffle=shuffle))
    full = list(dataset.iter_batches(4, shuffle=shuffle, drop_last=True))
    assert [len(batch) for batch in every] == [4, 4, 2]
    assert [batch.row_ids for batch in full] == [batch.row_ids for batch in every[:2]]
    assert list(dataset.iter_batches(11, drop_last=True)) == []
    assert len(list(dataset.iter_batches(5, drop_last=True))) == 2


# --- traces -------------------------------------------------------------------------------------


@pytest.mark.requirement("D-9")
def test_a_trace_by_row_id_or_why_not(store):
    rows = make_rows(7, failed=[1])
    trace = TraceSpec(sites=("L1_resid_post", "final_norm"), site_widths=(4, 4))
    write_dataset(store, rows, dataset_id="traced", trace=trace)
    write_dataset(store, rows, dataset_id="plain")
    traced = load_dataset(store, "traced")
    for number, row_id in enumerate(traced.row_ids):
        found = traced.trace(row_id)
        assert np.array_equal(found.token_ids, traced.token_ids[number])
        assert set(found.sites) == set(trace.sites)
        assert np.array_equal(found.sites["L1_resid_post"][-1], traced.features[number])
    with pytest.raises(InvalidInputError, match="it failed with too_long"):
        traced.trace(rows[1].id)
    with pytest.raises(
        NotOfferedError, match=r"'plain' holds no traces; .*capture it .*full_trace"
    ):
        load_dataset(store, "plain").trace(rows[0].id)


def test_a_trace_is_decoded_once(store, monkeypatch):
    rows = make_rows(4)
    trace = TraceSpec(sites=("L1_resid_post",), site_widths=(4,))
    write_dataset(store, rows, trace=trace, per_shard=2)
    dataset = load_dataset(store, "d")
    read = []
    traces = dataset._files.traces
    monkeypatch.setattr(
        dataset._files, "traces", lambda shard, good: (read.append(shard), traces(shard, good))[1]
    )
    for row_id in dataset.row_ids * 2:
        dataset.trace(row_id)
    assert read == [0, 1]


def test_what_a_notebook_shows_is_short(local):
    rows = make_rows(3)
    trace = TraceSpec(sites=("L1_resid_post", "final_norm"), site_widths=(4, 4))
    write_dataset(local, rows, trace=trace)
    dataset = load_dataset(local, "d")
    assert repr(dataset.trace("r-0")) == "Trace(2 tokens × 2 sites)"
    assert repr(dataset.select(["r-0"])) == "Batch(1 feature rows × 4)"

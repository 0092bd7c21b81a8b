"""Feature rows in PyTorch's own loader: each once, in one order, in any number of processes."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
from dataset_builders import make_rows, write_dataset
from reading_builders import write_exact

from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.errors import InvalidInputError, NotOfferedError, StorageError

torch = pytest.importorskip("torch")
DataLoader = torch.utils.data.DataLoader

pytestmark = pytest.mark.requirement("P-4")

SITES = ("L0_resid_post", "L2_mlp_out")


@pytest.fixture
def rows():
    return make_rows(14, failed=[1, 7], sites=SITES)


@pytest.fixture
def written(local, rows):
    options = {"sites": SITES, "position": "all_prompt"}
    return np.stack(write_exact(local, rows, dtype="bfloat16", **options), axis=1)


@pytest.fixture
def dataset(local, written):
    return load_dataset(local, "d")


def gathered(batches):
    """All rows of some batches: ids, row numbers, places in them, and float32 features."""
    batches = list(batches)
    ids = [one for batch in batches for one in batch["id"]]
    columns = [
        np.concatenate([b[name].float().numpy() for b in batches])
        for name in ("row", "index_in_row", "features")
    ]
    return ids, *columns


def same(found, reference):
    """Whether loaded batches are those that ``iter_batches`` gives."""
    reference = list(reference)
    ids, rows, index_in_row, features = gathered(found)
    return (
        ids == [one for batch in reference for one in batch.row_ids]
        and np.array_equal(rows, np.concatenate([b.rows for b in reference]))
        and np.array_equal(index_in_row, np.concatenate([b.index_in_row for b in reference]))
        and np.array_equal(features, np.concatenate([b.features for b in reference]))
    )


# --- map-style ----------------------------------------------------------------------------------


def test_one_item_for_each_feature_row(dataset, written):
    items = dataset.torch_dataset()
    assert isinstance(items, torch.utils.data.Dataset)
    assert len(items) == len(written) == 35
    for number, item in enumerate(items):
        assert item["features"].dtype == torch.bfloat16
        assert np.array_equal(item["features"].float().numpy(), written[number])
        start, stop = dataset.offsets[item["row"]], dataset.offsets[item["row"] + 1]
        assert start <= number < stop
        assert item["index_in_row"] == number - start
        assert item["id"] == dataset.row_ids[item["row"]]
    assert torch.equal(items[-1]["features"], items[34]["features"])
    for number in (35, -36):
        with pytest.raises(IndexError, match=f"^feature row {number} of a dataset that has 35$"):
            items[number]
    with pytest.raises(IndexError, match=r"^feature row 35 of"):
        items.__getitems__([0, 35, 99])
    assert items.__getitems__([]) == []


def test_the_loader_shuffles_and_batches_items(dataset, written):
    loader = DataLoader(dataset.torch_dataset(site=SITES[1]), batch_size=8, shuffle=True)
    ids, rows, index_in_row, features = gathered(loader)
    numbers = dataset.offsets[rows.astype(int)] + index_in_row.astype(int)
    assert sorted(numbers.tolist()) == list(range(35))
    assert np.array_equal(features, written[numbers, 1])
    assert ids == [dataset.row_ids[int(row)] for row in rows]


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_items_in_other_processes(dataset, written, context):
    loader = DataLoader(
        dataset.torch_dataset(), batch_size=10, num_workers=2, multiprocessing_context=context
    )
    ids, _, _, features = gathered(loader)
    assert np.array_equal(features, written)
    assert len(set(ids)) == 12


# --- iterable -----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes")
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_the_batches_are_those_of_iter_batches_however_many_workers(dataset, workers, shuffle):
    batches = dataset.torch_iterable(4, shuffle=shuffle, seed=3)
    context = "fork" if workers else None
    loader = DataLoader(
        batches, batch_size=None, num_workers=workers, multiprocessing_context=context
    )
    assert len(loader) == 9
    assert same(loader, dataset.iter_batches(4, shuffle=shuffle, seed=3))
    batches.set_epoch(2)
    assert same(loader, dataset.iter_batches(4, shuffle=shuffle, seed=5))


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_that_outlive_a_pass_hear_of_the_next_epoch(dataset, context):
    batches = dataset.torch_iterable(4, site=SITES[0], shuffle=True, drop_last=True)
    loader = DataLoader(
        batches,
        batch_size=None,
        num_workers=2,
        persistent_workers=True,
        multiprocessing_context=context,
    )
    for epoch in range(3):
        batches.set_epoch(epoch)
        options = {"shuffle": True, "seed": epoch, "drop_last": True}
        assert same(loader, dataset.iter_batches(4, site=SITES[0], **options))


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3, 4, 10])
def test_ranks_share_every_feature_row(dataset, world, drop_last):
    parts = [
        dataset.torch_iterable(
            4, shuffle=True, seed=1, rank=rank, world_size=world, drop_last=drop_last
        )
        for rank in range(world)
    ]
    batches = [list(part) for part in parts]
    assert [len(part) for part in parts] == [len(one) for one in batches]
    if drop_last:
        assert {len(one) for one in batches} == {8 // world}
    # Dealt out in turn, so put together in turn they are one pass again.
    merged = [one[n] for n in range(9) for one in batches if n < len(one)]
    reference = list(dataset.iter_batches(4, shuffle=True, seed=1))
    assert not merged or same(merged, reference[: len(merged)])
    assert drop_last or len(merged) == 9


def test_workers_of_a_rank_share_what_is_its(dataset):
    batches = dataset.torch_iterable(4, shuffle=True, rank=1, world_size=3)
    loader = DataLoader(batches, batch_size=None, num_workers=2, multiprocessing_context="fork")
    assert same(loader, list(dataset.iter_batches(4, shuffle=True))[1::3])


def test_ranks_are_what_torch_distributed_says(dataset, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 2)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    found = list(dataset.torch_iterable(4))
    reference = list(dataset.iter_batches(4))
    assert same(found, reference[2::3])
    assert len(list(dataset.torch_iterable(4, rank=0, world_size=1))) == 9


def test_a_rank_is_one_of_the_world(dataset):
    for rank, world in ((2, 2), (-1, 2), (None, 2), (0, None), (0, 0)):
        with pytest.raises(InvalidInputError, match=f"found rank {rank} and world_size {world}"):
            dataset.torch_iterable(4, rank=rank, world_size=world)
    with pytest.raises(InvalidInputError, match="found size 0"):
        dataset.torch_iterable(0)


def test_batches_may_be_changed(local, rows):
    """Those of one local file would be views of it, which torch refuses to own quietly."""
    write_dataset(local, rows, dataset_id="one", per_shard=99)
    dataset = load_dataset(local, "one")
    before = dataset.features.copy()
    for batch in dataset.torch_iterable(5):
        batch["features"] += 1
    assert np.array_equal(dataset.features, before)


def test_a_dataset_in_memory_is_read_in_its_own_process_alone(rows, request):
    store = f"memory://{request.node.name}"
    (expected,) = write_exact(open_store(store), rows)
    batches = load_dataset(store, "d").torch_iterable(4)
    assert np.array_equal(gathered(DataLoader(batches, batch_size=None))[3], expected)
    with pytest.raises(NotOfferedError, match="memory of this process"):
        pickle.dumps(batches)


@pytest.mark.slow
def test_an_object_store_is_read_in_spawned_workers(s3_root, rows):
    (expected,) = write_exact(open_store(s3_root), rows)
    dataset = load_dataset(s3_root, "d")
    assert len(dataset.row_ids) == 12
    batches = dataset.torch_iterable(4)
    options = {"batch_size": None, "num_workers": 2}
    spawned = DataLoader(batches, multiprocessing_context="spawn", **options)
    assert np.array_equal(gathered(spawned)[3], expected)
    with pytest.raises(StorageError, match=r"_context='spawn'"):
        list(DataLoader(batches, multiprocessing_context="fork", **options))


def test_torch_is_imported_only_where_it_is_asked_for(local, rows):
    write_exact(local, rows, dtype="bfloat16")
    program = (
        "import sys\n"
        "from wllm_ray import load_dataset\n"
        f"dataset = load_dataset({local.uri!r}, 'd')\n"
        "dataset.features, dataset.stored(), list(dataset.iter_batches(4, shuffle=True))\n"
        "dataset.select(dataset.row_ids[:2]), dataset.to_arrow(), dataset.metadata\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr

"""What a dataset gives back."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from dataset_builders import (
    FAILED_ROW,
    capture,
    make_rows,
    make_spec,
    rows_of,
    site_values,
    stage_all,
    value_of,
    write_dataset,
)

import wllm_ray
from wllm_ray.dataset.format.layout import split_dataset_path
from wllm_ray.dataset.reading import maps
from wllm_ray.dataset.reading.files import list_datasets
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.reading.verify import verify_dataset
from wllm_ray.dataset.tools.inspect import inspect_dataset
from wllm_ray.dataset.writing.writer import commit_manifest, create_spec, stage_shard
from wllm_ray.errors import InvalidInputError, NotFoundError, NotOfferedError
from wllm_ray.sites import HookSite

pytestmark = pytest.mark.requirement("P-4")

SITES = ("L0_resid_post", "L2_mlp_out")


@pytest.fixture
def rows():
    return make_rows(14, failed=[FAILED_ROW, 7])


@pytest.fixture
def good(rows):
    return [row for row in rows if row.failure is None]


@pytest.fixture
def dataset(store, root, rows):
    write_dataset(store, rows)
    return load_dataset(root, "d")


@pytest.fixture
def ragged(store, root, rows):
    write_dataset(store, rows, dataset_id="ragged", position="all_prompt", sites=SITES)
    return load_dataset(root, "ragged")


@pytest.mark.requirement("D-10")
def test_good_rows_in_request_order_with_everything_aligned(dataset, good):
    assert len(dataset) == 12
    assert dataset.row_ids == [row.id for row in good]
    assert np.array_equal(dataset.features, [value_of(row.index) for row in good])
    assert dataset.offsets.tolist() == list(range(13))
    assert dataset.offsets.dtype == np.int64
    assert dataset.request_digests == [row.request_digest for row in good]
    for ids, row in zip(dataset.token_ids, good, strict=True):
        assert ids.dtype == np.int32
        assert np.array_equal(ids, row.token_ids)


def test_metadata_comes_back_exactly(dataset):
    assert dataset.metadata[1] == {"label": 0, "n": 10**30, "x": 1.0, "text": "\ud83d\u2028"}
    assert isinstance(dataset.metadata[1]["x"], float)


def test_failures_by_id_with_index(dataset, rows):
    assert list(dataset.failures) == [rows[1].id, rows[7].id]
    failure = dataset.failures[rows[7].id]
    assert (failure.index, failure.code, failure.permanent) == (7, "too_long", True)
    assert failure.message == "200 tokens, the model takes 128"


def test_shapes(dataset, ragged):
    assert dataset.features.shape == (12, 4)
    assert dataset.features_3d.shape == (12, 1, 4)
    assert ragged.features.shape == ragged.features_3d.shape == (35, 2, 4)
    assert ragged.features.dtype == np.float32
    assert "12 rows, 2 failed, 35 × L0_resid_post, L2_mlp_out × 4, tiny" in repr(ragged)


def test_ragged_rows_by_offset(ragged, good):
    for number, row in enumerate(good):
        start, stop = ragged.offsets[number : number + 2]
        expected = [
            [value_of(row.index, position, site) for site in range(2)]
            for position in range(len(row.token_ids))
        ]
        assert np.array_equal(ragged.features[start:stop], expected)


def test_site_by_any_spelling(ragged, dataset):
    second = ragged.site("blocks.2.hook_mlp_out")
    assert np.array_equal(second, ragged.features_3d[:, 1])
    assert np.array_equal(dataset.site("L1_block"), dataset.features)
    with pytest.raises(InvalidInputError, match="does not have site L3_resid_post; it has") as e:
        ragged.site("L3_resid_post")
    assert e.value.code == "invalid_site"


def test_site_by_its_object(ragged):
    assert np.array_equal(ragged.site(HookSite(2, "mlp_out")), ragged.site("L2_mlp_out"))
    with pytest.raises(InvalidInputError, match="does not have site L2_resid_post"):
        ragged.site(HookSite(2, "resid_post"))


@pytest.mark.parametrize(
    ("name", "match"),
    [
        (2, r"found 2; write for example 'L2_mlp_out'; .* has L0_resid_post, L2_mlp_out"),
        (12, r"found 12; write for example 'L0_resid_post'"),
        (None, r"found None; write for example 'L0_resid_post'"),
        ("layer 2", r"write for example L12_resid_post.* has L0_resid_post, L2_mlp_out"),
    ],
)
def test_what_is_no_site_is_refused_with_what_is(ragged, name, match):
    with pytest.raises(InvalidInputError, match=match) as error:
        ragged.site(name)
    assert error.value.code == "invalid_site"


def test_one_site_of_many_shards_is_gathered_alone(ragged, root):
    alone = load_dataset(root, "ragged").site("L2_mlp_out")  # afresh: nothing is gathered yet
    assert alone.base is None  # no part of an array of all sites
    assert np.array_equal(alone, ragged.features[:, 1])
    assert np.array_equal(ragged.site("L2_mlp_out"), alone)
    assert np.shares_memory(ragged.site("L2_mlp_out"), ragged.features)


def test_arrays_are_read_only(dataset, ragged):
    arrays = (dataset.features, ragged.features, dataset.offsets, ragged.site("L2_mlp_out"))
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def one_shard(store, **options):
    write_dataset(store, make_rows(14, failed=[1]), dataset_id="one", per_shard=99, **options)
    return load_dataset(store, "one")


def is_mapped(array):
    """Whether the values lie in a file's own pages."""
    lines = (line.split() for line in Path("/proc/self/maps").read_text().splitlines())
    spans = [line[0].split("-") for line in lines if line[-1].endswith(".npy")]
    return any(int(start, 16) <= array.ctypes.data < int(stop, 16) for start, stop in spans)


@pytest.fixture
def map_all(monkeypatch):
    """Small files are mapped, too."""
    monkeypatch.setattr(maps, "MAPPED_FROM", 1)


@pytest.mark.usefixtures("map_all")
def test_one_local_shard_is_mapped_and_not_copied(local):
    dataset = one_shard(local)
    assert is_mapped(dataset.features)
    assert not is_mapped(dataset.features.copy())
    assert np.shares_memory(dataset.features, dataset.site("L1_resid_post"))
    assert np.shares_memory(dataset.features, next(iter(dataset.iter_batches(3))).features)


def test_opening_reads_nothing_but_the_manifest(local, rows):
    """Every other file may as well hold nothing but zeros, of the recorded size."""
    write_dataset(local, rows)
    folder = Path(local.uri) / "datasets" / "d"
    others = [path for path in folder.iterdir() if path.name != "manifest.json"]
    for path in others:
        path.write_bytes(bytes(path.stat().st_size))
    dataset = load_dataset(local, "d")
    assert (len(others), len(dataset), dataset.manifest.shape) == (16, 12, (12, 1, 4))
    assert "12 rows, 2 failed" in repr(dataset)


def test_many_sites_are_not_all_spelt_out(local):
    sites = tuple(f"L{layer}_resid_post" for layer in range(9))
    for name, of_it in (("all", sites), ("few", sites[:8])):
        write_dataset(
            local, make_rows(2), dataset_id=name, sites=of_it, site_widths=(4,) * len(of_it)
        )
    many, few = load_dataset(local, "all"), load_dataset(local, "few")
    short = "L0_resid_post, L1_resid_post, L2_resid_post, L3_resid_post, … L8_resid_post (9 sites)"
    assert f"2 × {short} × 4, tiny" in repr(many)
    with pytest.raises(InvalidInputError, match=re.escape(f"it has {short}")):
        many.site("L3_mlp_out")
    assert f"2 × {', '.join(sites[:8])} × 4, tiny" in repr(few)
    widths = (4, 6, 4, 4, 4, 4, 4, 4, 5)
    write_dataset(local, make_rows(2), dataset_id="uneven", sites=sites, site_widths=widths)
    assert f"2 × {short} × widths 4, 6, 4, 4, … 5 (9 sites), tiny" in repr(
        load_dataset(local, "uneven")
    )


@pytest.mark.parametrize("size", [1, 4, 5, 12, 100])
def test_batches_in_order(dataset, ragged, good, size):
    for data, ids in (
        (dataset, [row.id for row in good]),
        (ragged, [row.id for row in good for _ in row.token_ids]),
    ):
        batches = list(data.iter_batches(size))
        assert [len(batch.features) for batch in batches[:-1]] == [size] * (len(batches) - 1)
        assert np.array_equal(np.concatenate([b.features for b in batches]), data.features)
        assert [row_id for b in batches for row_id in b.row_ids] == ids


@pytest.mark.parametrize("size", [1, 4, 100])
def test_shuffled_batches_are_that_permutation(dataset, ragged, size):
    for data in (dataset, ragged):
        order = np.random.default_rng(7).permutation(len(data.features))
        batches = list(data.iter_batches(size, shuffle=True, seed=7))
        features = np.concatenate([b.features for b in batches])
        assert np.array_equal(features, np.take(data.features, order, axis=0))
        row = np.searchsorted(data.offsets, order, side="right") - 1
        expected = [data.row_ids[one] for one in row]
        assert [row_id for b in batches for row_id in b.row_ids] == expected
        other = next(iter(data.iter_batches(100, shuffle=True, seed=8))).row_ids
        assert other != expected


@pytest.mark.parametrize("size", [0, 2.5, "4", None])
def test_a_batch_holds_something(dataset, size):
    with pytest.raises(InvalidInputError, match=f"integer from 1 on, found size {size!r}"):
        dataset.iter_batches(size)


@pytest.mark.parametrize("seed", [-1, 1.5, "7"])
def test_a_seed_is_a_natural_number(dataset, seed):
    with pytest.raises(InvalidInputError, match=f"integer from 0 on, found seed {seed!r}"):
        dataset.iter_batches(4, shuffle=True, seed=seed)


def test_size_and_seed_may_be_of_numpy(dataset):
    (batch,) = dataset.iter_batches(np.int32(99), shuffle=True, seed=np.uint64(7))
    (expected,) = dataset.iter_batches(99, shuffle=True, seed=7)
    assert batch.row_ids == expected.row_ids


def test_select_in_the_order_asked(dataset, ragged, good):
    ids = [good[11].id, good[0].id]
    picked = dataset.select(ids)
    assert picked.row_ids == ids
    assert np.array_equal(picked.features, [value_of(13), value_of(0)])
    tokens = ragged.select(ids)
    assert tokens.row_ids == [ids[0]] * len(good[11].token_ids) + [ids[1]] * 2
    assert tokens.features.shape == (len(tokens.row_ids), 2, 4)
    assert dataset.select([]).features.shape == (0, 4)


def test_select_refuses_one_id_for_a_list(dataset, good):
    with pytest.raises(InvalidInputError, match=r"list of row ids, found 'r-0'; write .*\['r-0'\]"):
        dataset.select(good[0].id)
    for wrong in (5, None, b"r-0"):
        with pytest.raises(InvalidInputError, match=f"takes a list of row ids, found {wrong!r}$"):
            dataset.select(wrong)


def test_select_says_why_a_row_is_not_there(dataset, rows):
    with pytest.raises(InvalidInputError, match="it failed with too_long"):
        dataset.select([rows[1].id])
    with pytest.raises(InvalidInputError, match=r"row 'nobody' has no activation.*no such row"):
        dataset.select(["nobody"])
    for wrong in (["r-0"], 0, None):
        with pytest.raises(InvalidInputError, match="a row id is a text, found") as error:
            dataset.select([wrong])
        assert error.value.code == "invalid_argument"


def test_arrow_table(dataset, ragged, good):
    table = dataset.to_arrow()
    table.validate(full=True)
    assert table.column_names == ["id", "metadata", "token_ids", "L1_resid_post"]
    assert table["id"].to_pylist() == [row.id for row in good]
    assert np.array_equal(table["L1_resid_post"].to_pylist(), dataset.features)
    tokens = ragged.to_arrow()
    tokens.validate(full=True)
    assert tokens.column_names[3:] == list(SITES)
    for number, row in enumerate(tokens["L2_mlp_out"].to_pylist()):
        start, stop = ragged.offsets[number : number + 2]
        assert np.array_equal(row, ragged.features[start:stop, 1])


def test_arrow_of_one_site_is_not_copied(local):
    dataset = one_shard(local)
    column = dataset.to_arrow()["L1_resid_post"].chunk(0)
    assert column.values.buffers()[1].address == dataset.features.ctypes.data
    assert pa.types.is_fixed_size_list(column.type)


def test_torch_tensor(store, dataset):
    torch = pytest.importorskip("torch")
    tensor = dataset.to_torch()
    assert tensor.dtype == torch.float32
    assert np.array_equal(tensor.numpy(), dataset.features)
    single = one_shard(store)
    changed = single.to_torch()
    changed += 1  # private memory: neither the file nor the dataset sees it
    assert np.array_equal(changed.numpy(), single.features + 1)
    assert single.verify().ok


def test_no_good_row_at_all(store, root):
    rows = make_rows(2, failed=[0, 1])
    spec = make_spec(rows)
    create_spec(store, spec)
    stage_shard(store, spec, 0, rows, [])
    commit_manifest(store, "d")
    dataset = load_dataset(root, "d", verify="full")
    assert (len(dataset), dataset.features.shape, dataset.row_ids) == (0, (0, 4), [])
    assert list(dataset.iter_batches(4)) == []
    assert dataset.to_arrow().num_rows == 0
    assert len(dataset.failures) == 2


def test_the_public_name(root, store, rows):
    write_dataset(store, rows)
    assert isinstance(wllm_ray.load_dataset(root, "d"), wllm_ray.ActivationDataset)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        wllm_ray.nothing  # noqa: B018 (the access is the test)


def test_not_found_says_what_there_is(store, root, rows):
    store.put("something", b"else")
    with pytest.raises(NotFoundError, match="committed there: none"):
        load_dataset(root, "d")
    write_dataset(store, rows, dataset_id="other")
    with pytest.raises(NotFoundError, match="committed there: other") as error:
        load_dataset(root, "d")
    assert error.value.code == "dataset_not_found"
    spec = make_spec(rows)
    create_spec(store, spec)
    part = rows_of(spec, rows, 0)
    stage_shard(store, spec, 0, part, [capture(part, spec)])
    with pytest.raises(
        NotFoundError, match=r"shards staged so far: 1. Run the same job or merge again"
    ):
        load_dataset(root, "d")
    assert list_datasets(store) == ["other"]


def test_a_root_that_does_not_exist_is_told(tmp_path):
    for call in (load_dataset, verify_dataset, inspect_dataset):
        with pytest.raises(NotFoundError, match=r"under .*/nowhere; there is no such folder") as e:
            call(tmp_path / "nowhere", "d")
        assert e.value.code == "dataset_not_found"
    assert not (tmp_path / "nowhere").exists()


def test_a_dataset_by_its_own_path(root, store, rows, tmp_path, monkeypatch):
    write_dataset(store, rows)
    assert load_dataset(f"{root}/datasets/d").row_ids == load_dataset(root, "d").row_ids
    assert len(load_dataset(f"{root}/datasets/d/", verify="full")) == 12
    if not root.startswith("memory"):
        monkeypatch.chdir(root)
        assert len(load_dataset(Path("datasets/d"))) == 12
    for other in (root, f"{root}/datasets", store):
        with pytest.raises(InvalidInputError, match=r"expected load_dataset\(ROOT, DATASET_ID\)"):
            load_dataset(other)


def test_the_root_of_a_dataset_path():
    assert split_dataset_path("/datasets/d") == ("/", "d")
    assert split_dataset_path("datasets/d") == (".", "d")
    assert split_dataset_path("a/datasets/d/") == ("a", "d")
    assert split_dataset_path("d") is None
    assert split_dataset_path("a/data/d") is None


def test_bad_arguments(root):
    with pytest.raises(InvalidInputError, match="found 'sometimes'"):
        load_dataset(root, "d", verify="sometimes")
    for dataset_id in ("../x", "", "a/b", "-x", "x" * 129, "d\n"):
        with pytest.raises(InvalidInputError, match="a dataset id starts with"):
            load_dataset(root, dataset_id)


def test_verify_of_a_good_dataset(store, root, rows):
    manifest = write_dataset(store, rows)
    report = verify_dataset(root, "d")
    assert (report.ok, report.faults, report.notes, report.advice) == (True, (), (), "")
    assert (report.files, report.bytes) == (2 + 3 * 5, manifest.bytes)
    store.put("datasets/d/.tmp-host-1-1", b"half")
    assert verify_dataset(root, "d").notes == ("datasets/d/.tmp-host-1-1: 4 bytes, no record",)


def test_inspect(store, root, rows):
    manifest = write_dataset(store, rows)
    summary = inspect_dataset(root, "d")
    assert summary["rows"] == 14
    assert summary["rows_failed"] == 2
    assert summary["shape"] == [12, 1, 4]
    assert summary["content_sha256"] == manifest.content_sha256
    assert summary["fingerprint"]["engine"] == "fake"


# --- one file for each site -----------------------------------------------------------------------

WIDTHS = (4, 6)
POSITIONS = ("last_prompt", "all_prompt", "mean_prompt", "index:0,-1", "index:1,0,-1")


@pytest.fixture(params=POSITIONS)
def uneven(store, root, rows, request):
    """Sites of different widths, rows over several shards."""
    options = {"position": request.param, "sites": SITES, "site_widths": WIDTHS}
    write_dataset(store, rows, dataset_id="uneven", **options)
    return load_dataset(root, "uneven")


@pytest.mark.requirement("C-8", "D-1")
def test_sites_of_different_widths_at_every_position(uneven, rows, good):
    spec = make_spec(rows, position=uneven.manifest.position, sites=SITES, site_widths=WIDTHS)
    assert uneven.manifest.shard_layout == "per_site"
    assert uneven.manifest.shape == (uneven.offsets[-1], 2, None)
    table = uneven.to_arrow()
    table.validate(full=True)
    for number, site in enumerate(SITES):
        expected = site_values(rows, spec, number)
        assert np.array_equal(uneven.site(site), expected)
        order = np.random.default_rng(3).permutation(len(expected))
        for batches, wanted in (
            (uneven.iter_batches(4, site=site), expected),
            (uneven.iter_batches(4, site=site, shuffle=True, seed=3), expected[order]),
        ):
            assert np.array_equal(np.concatenate([b.features for b in batches]), wanted)
        picked = [good[7], good[2], good[3]]
        batch = uneven.select([row.id for row in picked], site=site)
        assert np.array_equal(
            batch.features, np.concatenate([site_values([row], spec, number) for row in picked])
        )
        column = table[site].combine_chunks()
        vectors = column.flatten() if pa.types.is_large_list(column.type) else column
        assert np.array_equal(vectors.to_pylist(), expected)
    for number, row in enumerate(good):
        start, stop = uneven.offsets[number : number + 2]
        assert np.array_equal(uneven.site(SITES[1])[start:stop], site_values([row], spec, 1))


def test_no_one_array_holds_sites_of_different_widths(uneven, good):
    calls = (
        lambda: uneven.features,
        lambda: uneven.features_3d,
        lambda: uneven.iter_batches(4),
        lambda: uneven.select([good[0].id]),
        uneven.to_torch,
    )
    for call in calls:
        with pytest.raises(NotOfferedError, match=r"L2_mlp_out has 6.*one site by its name") as e:
            call()
        assert e.value.code == "widths_not_representable"
    assert "× L0_resid_post, L2_mlp_out × widths 4, 6, tiny" in repr(uneven)


def test_a_file_for_each_site_holds_what_one_file_of_all_does(store, rows):
    torch = pytest.importorskip("torch")
    options = {"position": "all_prompt", "sites": SITES}
    write_dataset(store, rows, dataset_id="a", shard_layout="stacked", **options)
    write_dataset(store, rows, dataset_id="b", shard_layout="per_site", **options)
    write_dataset(store, rows, dataset_id="c", shard_layout="per_site", per_shard=99, **options)
    stacked = load_dataset(store, "a")
    ids = stacked.row_ids[::-2]
    for name in ("b", "c"):
        other = load_dataset(store, name)
        assert stacked.manifest.content_sha256 != other.manifest.content_sha256
        assert np.array_equal(other.features, stacked.features)
        assert not other.features.flags.writeable
        assert np.array_equal(other.select(ids).features, stacked.select(ids).features)
        assert torch.equal(other.to_torch(), stacked.to_torch())
        assert other.to_arrow().combine_chunks() == stacked.to_arrow().combine_chunks()
        for shuffle in (False, True):
            pairs = zip(
                other.iter_batches(4, shuffle=shuffle),
                stacked.iter_batches(4, shuffle=shuffle),
                strict=True,
            )
            assert all(np.array_equal(one.features, two.features) for one, two in pairs)


def test_one_site_with_a_file_to_itself_is_as_one_site(store, rows):
    write_dataset(store, rows, shard_layout="per_site", per_shard=99)
    dataset = load_dataset(store, "d")
    assert dataset.manifest.shape == (12, 1, 4)
    assert (dataset.features.shape, dataset.features_3d.shape) == ((12, 4), (12, 1, 4))
    assert np.shares_memory(dataset.features, dataset.site("L1_resid_post"))


@pytest.mark.usefixtures("map_all")
def test_a_site_with_a_local_file_to_itself_is_mapped_and_not_copied(local):
    torch = pytest.importorskip("torch")
    dataset = one_shard(local, position="all_prompt", sites=SITES, site_widths=WIDTHS)
    values = dataset.site(SITES[1])
    assert is_mapped(values)
    assert np.shares_memory(values, next(iter(dataset.iter_batches(3, site=SITES[1]))).features)
    column = dataset.to_arrow()[SITES[1]].chunk(0)
    assert column.values.values.buffers()[1].address == values.ctypes.data
    tensor = dataset.to_torch(site=SITES[1])
    tensor += 1  # private memory: neither the file nor the dataset sees it
    assert torch.equal(tensor, torch.from_numpy(values + 1))
    assert dataset.verify().ok


def opened_files(monkeypatch):
    opened = []
    map_file = maps.map_file

    def recording(path):
        opened.append(path.name)
        return map_file(path)

    monkeypatch.setattr(maps, "map_file", recording)
    return opened


def test_one_site_is_read_from_its_own_files_alone(local, rows, monkeypatch):
    write_dataset(local, rows, position="all_prompt", sites=SITES, site_widths=WIDTHS)
    opened = opened_files(monkeypatch)
    for read in (
        lambda one: one.site(SITES[1]),
        lambda one: list(one.iter_batches(4, site=SITES[1])),
        lambda one: one.to_torch(site=SITES[1]),
    ):
        opened.clear()
        read(load_dataset(local, "d"))
        arrays = [name for name in opened if name.endswith(".npy")]
        assert len(arrays) == 5
        assert all(name.endswith(f".{SITES[1]}.npy") for name in arrays)


def test_selected_rows_are_read_from_their_own_shards_alone(local, rows, monkeypatch):
    write_dataset(local, rows, position="all_prompt", sites=SITES)
    dataset = load_dataset(local, "d")
    opened = opened_files(monkeypatch)
    dataset.select([rows[4].id, rows[3].id])
    assert [name[:11] for name in opened if name.endswith(".npy")] == ["shard-00001"]


@pytest.mark.requirement("C-8")
def test_a_row_of_one_token_has_its_first_and_last_twice(store, root):
    rows = make_rows(3)
    rows[1] = rows[1]._replace(token_ids=np.array([7], np.int32))
    spec = make_spec(rows, position="index:0,-1", sites=SITES)
    stage_all(store, spec, rows)
    commit_manifest(store, "d")
    dataset = load_dataset(root, "d", verify="full")
    assert dataset.offsets.tolist() == [0, 2, 4, 6]
    first, last = dataset.select([rows[1].id]).features
    assert np.array_equal(first, last)
    assert np.array_equal(first, [value_of(1, 0, 0), value_of(1, 0, 1)])
    assert np.array_equal(
        dataset.features[4:],
        [
            [value_of(2, 0, 0), value_of(2, 0, 1)],
            [value_of(2, 3, 0), value_of(2, 3, 1)],
        ],
    )


def test_no_good_row_at_all_in_files_of_their_own(store, root):
    rows = make_rows(2, failed=[0, 1])
    spec = make_spec(rows, sites=SITES, site_widths=WIDTHS, position="all_prompt")
    create_spec(store, spec)
    stage_shard(store, spec, 0, rows, [])
    manifest = commit_manifest(store, "d")
    assert [entry.bytes for entry in manifest.shards[0].features_files] == [128, 128]
    dataset = load_dataset(root, "d", verify="full")
    assert [dataset.site(site).shape for site in SITES] == [(0, 4), (0, 6)]
    assert list(dataset.iter_batches(4, site=SITES[0])) == []
    assert dataset.to_arrow().num_rows == 0


def test_an_unknown_site_is_refused_by_all_who_take_one(dataset):
    for call in (
        lambda: dataset.iter_batches(4, site="L3_mlp_out"),
        lambda: dataset.select([], site="L3_mlp_out"),
        lambda: dataset.to_torch(site="L3_mlp_out"),
    ):
        with pytest.raises(InvalidInputError, match="does not have site L3_mlp_out; it has L1_r"):
            call()

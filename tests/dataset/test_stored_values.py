"""What is stored of captured values: dtypes, what does not fit, unlike engines, traces."""

from __future__ import annotations

import re

import numpy as np
import pytest
from dataset_builders import (
    capture,
    captured_of,
    features_of,
    make_rows,
    make_spec,
    rows_of,
    stage_all,
    value_of,
    write_dataset,
)

from wllm_ray.dataset.format.layout import folder
from wllm_ray.dataset.format.manifest import TraceSpec
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.reading.verify import verify_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.dataset.writing.writer import commit_manifest, create_spec, stage_shard
from wllm_ray.errors import ConflictError, IntegrityError, StorageError
from wllm_ray.records import RowFailure

SITES = ("embed", "L1_mlp_out")
TRACE = TraceSpec(sites=("embed", "L1_mlp_out", "final_norm"), site_widths=(4, 4, 4))


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    return open_store(tmp_path if request.param == "local" else f"memory://{tmp_path}")


def stored(store, special, **options):
    """A dataset of three rows, the second with these values at both sites."""
    rows = make_rows(3, sites=SITES)
    spec = make_spec(rows, sites=SITES, **options)
    create_spec(store, spec)
    odd = np.ones((1, 8), np.float32)
    odd[0, : len(special)] = special
    engine = spec.dtype if spec.storage_dtype == "native" else "float32"
    chunk = capture(rows, spec, features={1: odd}, engine_dtype=engine)
    stage_shard(store, spec, 0, rows, [chunk])
    commit_manifest(store, "d")
    return load_dataset(store, "d", verify="full")


FLOAT16 = {"storage_dtype": "float16", "dtype": "float16"}
NATIVE = {"storage_dtype": "native", "dtype": "bfloat16"}
NATIVE16 = {"storage_dtype": "native", "dtype": "float16"}


@pytest.mark.requirement("C-10", "D-1")
@pytest.mark.parametrize("shard_format", ["npy", "arrow"])
@pytest.mark.parametrize(
    ("options", "given", "kept"),
    [
        ({}, [1e30, -1e-40, 2.5], [1e30, -1e-40, 2.5]),
        (FLOAT16, [65504.0, 2049.0, 1e-9], [65504.0, 2048.0, 0.0]),
        (NATIVE, [1e30, -2.5, 0.0], None),
    ],
)
def test_values_come_back_as_their_dtype_holds_them(store, shard_format, options, given, kept):
    given = np.float32(given)
    if kept is None:
        given = kept = (given.view(np.uint32) & 0xFFFF0000).view(np.float32)
    dataset = stored(store, given, shard_format=shard_format, **options)
    assert not dataset.failures
    assert np.array_equal(dataset.site("embed")[1, :3], np.float32(kept))
    assert verify_dataset(store, "d").ok


@pytest.mark.requirement("C-10")
@pytest.mark.parametrize(
    ("options", "special", "said"),
    [
        (FLOAT16, [1.0, 65520.0], "embed holds 65520, which is too large for float16, first at"),
        (
            FLOAT16,
            [1.0, 1, 1, 1, -1e6],
            "L1_mlp_out holds -1e\\+06, which is too large for float16",
        ),
        (FLOAT16, [1e-9] * 4, "every value of embed is zero .* once it is rounded to float16"),
        (NATIVE, [1.0, 1, 1, 1 + 2**-20], "embed holds values that bfloat16 would round"),
        (NATIVE16, [1.0, 1, 1, 1, 1 + 2**-20], "L1_mlp_out holds values that float16 would round"),
    ],
)
def test_a_row_that_does_not_fit_fails_alone_and_says_where(store, options, special, said):
    dataset = stored(store, special, **options)
    (failure,) = dataset.failures.values()
    assert failure.index == 1
    assert (failure.code, failure.stage, failure.permanent) == ("storage_overflow", "stage", True)
    assert re.search(said, failure.message)
    # An engine's own dtype holds its values, unless it is what was asked for.
    other = "; store float32" if options in (NATIVE, NATIVE16) else "; store float32 or native"
    assert failure.message.endswith(other)
    assert len(dataset) == 2


@pytest.mark.requirement("C-3")
@pytest.mark.parametrize("options", [{}, FLOAT16, NATIVE])
@pytest.mark.parametrize(
    ("special", "code"),
    [([1.0, np.nan], "non_finite"), ([1.0, np.inf], "non_finite"), ([-0.0] * 4, "all_zero")],
)
def test_what_is_never_stored_is_told_whatever_the_dtype(store, options, special, code):
    (failure,) = stored(store, special, **options).failures.values()
    assert failure.code == code


@pytest.mark.requirement("C-10", "D-7")
def test_an_engine_in_another_dtype_than_the_datasets_is_refused(store):
    rows = make_rows(3)
    spec = make_spec(rows, storage_dtype="native", dtype="bfloat16")
    create_spec(store, spec)
    with pytest.raises(ConflictError, match="or dtype from the spec's") as error:
        stage_shard(store, spec, 0, rows, [capture(rows, spec, engine_dtype="float32")])
    assert error.value.code == "mixed_fingerprints"


# --- unlike engines -----------------------------------------------------------------------------


def staged_by(store, spec, rows, devices):
    create_spec(store, spec)
    for shard, device in enumerate(devices):
        part = rows_of(spec, rows, shard)
        stage_shard(store, spec, shard, part, [capture(part, spec, device=device)])


@pytest.mark.requirement("D-7")
def test_unlike_engines_are_kept_apart_shard_by_shard_where_they_are_asked_for(store):
    rows = make_rows(9)
    spec = make_spec(rows, mixed_fingerprints=True)
    staged_by(store, spec, rows, ["a", "b", "a"])
    manifest = commit_manifest(store, "d")
    assert manifest.reproducibility == "mixed"
    assert manifest.fingerprint.device == "a"
    assert [one.fingerprint and one.fingerprint.device for one in manifest.shards] == [
        None,
        "b",
        None,
    ]
    assert verify_dataset(store, "d").ok
    others = make_spec(rows, mixed_fingerprints=True, dataset_id="others")
    staged_by(store, others, rows, ["a", "a", "b"])
    assert commit_manifest(store, "others").content_sha256 != manifest.content_sha256


@pytest.mark.requirement("D-7", "D-3")
def test_permission_to_mix_changes_nothing_where_nothing_is_mixed(store):
    rows = make_rows(9)
    manifest = write_dataset(store, rows, mixed_fingerprints=True)
    plain = write_dataset(store, rows, dataset_id="plain")
    assert (manifest.reproducibility, manifest.content_sha256) == ("bitwise", plain.content_sha256)


@pytest.mark.requirement("D-7")
def test_within_a_shard_engines_are_never_mixed(store):
    rows = make_rows(2)
    spec = make_spec(rows, mixed_fingerprints=True)
    create_spec(store, spec)
    chunks = [capture(rows[:1], spec, device="a"), capture(rows[1:], spec, device="b")]
    with pytest.raises(ConflictError, match="shard 0 would mix engines"):
        stage_shard(store, spec, 0, rows, chunks)


# --- traces -------------------------------------------------------------------------------------


@pytest.mark.requirement("D-9")
@pytest.mark.parametrize("position", ["last_prompt", "mean_prompt", "all_prompt", "index:-1,0"])
@pytest.mark.parametrize("layout", ["stacked", "per_site"])
def test_a_dataset_with_traces_is_the_one_without_them_and_more(store, position, layout):
    rows = make_rows(5, failed=[1], sites=SITES)
    asked = {"position": position, "sites": SITES[::-1], "shard_layout": layout}
    traced = write_dataset(store, rows, trace=TRACE, **asked)
    reference = make_spec(rows, **asked, trace=TRACE)
    dataset = load_dataset(store, "d", verify="full")
    good = [row for row in rows if row.failure is None]
    for row in good:
        trace = dataset.trace(row.id)
        assert np.array_equal(trace.token_ids, row.token_ids)
        whole = features_of(row, captured_of(reference)).reshape(len(row.token_ids), 3, 4)
        for number, site in enumerate(TRACE.sites):
            assert np.array_equal(trace.sites[site], whole[:, number])
    without = write_taken(store, rows, good, dataset, asked)
    assert traced.content_sha256 == without.content_sha256
    assert verify_dataset(store, "d").ok


def write_taken(store, rows, good, dataset, asked):
    """The same dataset without traces, of values that NumPy alone takes out of the traces."""
    spec = make_spec(rows, dataset_id="plain", **asked)
    take = {
        "last_prompt": lambda a: a[-1:],
        "mean_prompt": lambda a: np.add.reduce(a, axis=0, keepdims=True) / np.float32(len(a)),
        "all_prompt": lambda a: a,
        "index:-1,0": lambda a: a[[-1, 0]],
    }[asked["position"]]
    values = {
        row.index: np.concatenate(
            [take(dataset.trace(row.id).sites[site]) for site in spec.sites], axis=1
        )
        for row in good
    }
    create_spec(store, spec)
    for shard in range(len(spec.shards)):
        part = rows_of(spec, rows, shard)
        stage_shard(store, spec, shard, part, [capture(part, spec, features=values)])
    return commit_manifest(store, "plain")


@pytest.mark.requirement("D-9")
def test_a_row_that_fails_has_no_trace_and_a_retry_brings_both(store):
    """Chunks of several attempts, in any order, with other rows' failures between them."""
    rows = make_rows(3, sites=SITES)
    spec = make_spec(rows, sites=SITES, trace=TRACE)
    create_spec(store, spec)
    lost = {1: RowFailure.of("position_missing", "lost")}
    first = capture(rows, spec, failures=lost)
    assert stage_shard(store, spec, 0, rows, [first]).transient.keys() == {1}
    dead = {1: RowFailure.of("poisonous", "dead")}
    again = capture(rows[1:2], spec, failures=dead)
    stage_shard(store, spec, 0, rows, [again, first])
    commit_manifest(store, "d")
    dataset = load_dataset(store, "d", verify="full")
    assert list(dataset.failures) == [rows[1].id]
    assert np.array_equal(dataset.trace(rows[2].id).sites["embed"][0], value_of(2))


@pytest.mark.requirement("D-9", "C-3")
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_a_trace_that_is_not_finite_fails_its_row_though_nobody_asked_for_that_place(store, bad):
    rows = make_rows(3, sites=SITES)
    spec = make_spec(rows, sites=SITES, trace=TRACE)
    create_spec(store, spec)
    odd = features_of(rows[1], captured_of(spec))
    odd[0, 9] = bad  # final_norm, at the first token of several
    chunk = capture(rows, spec, features={1: odd})
    stage_shard(store, spec, 0, rows, [chunk])
    commit_manifest(store, "d")
    dataset = load_dataset(store, "d", verify="full")
    (failure,) = dataset.failures.values()
    assert (failure.index, failure.code) == (1, "non_finite")
    assert "first at final_norm, token 0" in failure.message
    assert np.array_equal(dataset.features_3d[1, 0], value_of(2, 3, 0))
    assert len(dataset.trace(rows[2].id).token_ids) == len(rows[2].token_ids)
    assert verify_dataset(store, "d").ok


@pytest.mark.requirement("D-9")
def test_without_its_traces_there_is_no_dataset(store, monkeypatch):
    """The traces file cannot be written: no receipt, no manifest; what was written is an orphan."""
    rows = make_rows(3, sites=SITES)
    spec = make_spec(rows, sites=SITES, trace=TRACE)
    put = type(store).put_content

    def failing(self, prefix, suffix, data):
        if suffix == ".trace.arrow":
            raise StorageError("the disk is full")
        return put(self, prefix, suffix, data)

    monkeypatch.setattr(type(store), "put_content", failing)
    with pytest.raises(StorageError, match="the disk is full"):
        stage_all(store, spec, rows)
    names = [key.rpartition("/")[2] for key, _ in store.list(folder("d"))]
    assert not [name for name in names if name.endswith(("receipt.json", "manifest.json"))]
    monkeypatch.undo()
    stage_all(store, spec, rows)
    assert commit_manifest(store, "d").content_sha256
    assert len(load_dataset(store, "d", verify="full")) == 3


@pytest.mark.requirement("D-9", "D-6")
def test_a_chunk_without_the_sites_of_the_traces_is_refused(store):
    rows = make_rows(3, sites=SITES)
    spec = make_spec(rows, sites=SITES, trace=TRACE)
    create_spec(store, spec)
    plain = capture(rows, replace_trace(spec))
    with pytest.raises(IntegrityError, match="expected traces of 3 sites at every token") as error:
        stage_shard(store, spec, 0, rows, [plain])
    assert error.value.code == "array_invalid"


def replace_trace(spec):
    return spec.model_copy(update={"trace": None})

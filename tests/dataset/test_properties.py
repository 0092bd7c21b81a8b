"""However a shard was chunked, its bytes are the same."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from dataset_builders import capture, features_of, make_rows, make_spec
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from wllm_ray.dataset.format.manifest import TraceSpec
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.dataset.writing.writer import commit_manifest, create_spec, stage_shard
from wllm_ray.records import RowFailure

pytestmark = pytest.mark.requirement("D-3")

_names = itertools.count()
LOST = RowFailure.of("replica_lost", "gone")


@st.composite
def attempts(draw, count=7):
    """Rows, how they are cut into chunks, in which order these arrive, and which rows are lost."""
    failed = draw(st.sets(st.integers(0, count - 1), max_size=3))
    cuts = sorted(draw(st.sets(st.integers(1, count - 1))))
    runs = list(itertools.pairwise([0, *cuts, count]))
    lost = draw(st.sets(st.integers(0, count - 1)))
    return failed, draw(st.permutations(runs)), lost - failed


LAYOUTS = [((4,), "stacked"), ((4, 4), "stacked"), ((4, 4), "per_site"), ((2, 5), "per_site")]
POSITIONS = ["last_prompt", "all_prompt", "mean_prompt", "index:0,-1"]
SITES = ("embed", "L1_attn_out_prelinear")
# dtype → what is asked for, and what the engine says of itself.
DTYPES = {
    "float32": ({}, {}),
    "float16": ({"storage_dtype": "float16"}, {}),
    "bfloat16": ({"storage_dtype": "native"}, {"engine_dtype": "bfloat16"}),
}


def stage_in_chunks(store, spec, rows, runs, lost, **described):
    """Stage a shard whose rows come in these runs, some of them at the second attempt."""
    chunks = [
        capture(
            rows[start:stop],
            spec,
            failures={i: LOST for i in lost if start <= i < stop},
            **described,
        )
        for start, stop in runs
    ]
    chunks += [capture([rows[i]], spec, **described) for i in sorted(lost, reverse=True)]
    return stage_shard(store, spec, 0, rows, chunks)


def expect_same(store, spec, rows, attempt, **described):
    """The files of a shard in chunks are those of a shard in one piece; returns the dataset."""
    whole = stage_shard(store, spec, 0, rows, [capture(rows, spec, **described)])
    again = stage_in_chunks(store, spec, rows, *attempt, **described)
    assert again.receipt.files == whole.receipt.files
    assert not again.superseded
    create_spec(store, spec)
    commit_manifest(store, "d")
    return load_dataset(store, "d", verify="full")


def expect_values(dataset, spec, good):
    """Rows, offsets and values are those of the fake model."""
    assert dataset.row_ids == [row.id for row in good]
    expected = [features_of(row, spec) for row in good]
    if spec.dtype == "float16":
        expected = [one.astype(np.float16).astype(np.float32) for one in expected]
    side_by_side = np.concatenate([dataset.site(site) for site in spec.sites], axis=1)
    assert np.array_equal(side_by_side, np.concatenate(expected))
    for index, one in enumerate(expected):
        start, stop = dataset.offsets[index : index + 2]
        assert np.array_equal(side_by_side[start:stop], one)


@settings(max_examples=60)
@given(
    attempts(),
    st.sampled_from(POSITIONS),
    st.sampled_from(LAYOUTS),
    st.sampled_from(["npy", "arrow"]),
    st.sampled_from(sorted(DTYPES)),
)
def test_any_chunking_gives_the_same_bytes(attempt, position, layout, shard_format, dtype):
    assume((dtype, position) != ("bfloat16", "mean_prompt"))  # a mean is taken in float32
    failed, *attempt = attempt
    widths, layout = layout
    asked, described = DTYPES[dtype]
    rows = make_rows(7, failed=failed)
    spec = make_spec(
        rows,
        per_shard=7,
        position=position,
        sites=SITES[: len(widths)],
        site_widths=widths,
        shard_layout=layout,
        shard_format=shard_format,
        dtype=dtype,
        **asked,
    )
    store = open_store(f"memory://property-{next(_names)}")
    dataset = expect_same(store, spec, rows, attempt, **described)
    expect_values(dataset, spec, [row for row in rows if row.failure is None])


@pytest.mark.requirement("D-9")
@settings(max_examples=20)
@given(attempts(), st.sampled_from(["npy", "arrow"]))
def test_traces_are_the_same_however_they_were_chunked(attempt, shard_format):
    """And the features beside them are those of the dataset without traces."""
    failed, *attempt = attempt
    rows = make_rows(7, failed=failed)
    asked = {
        "per_shard": 7,
        "position": "all_prompt",
        "sites": SITES[1:],
        "site_widths": (5,),
        "shard_format": shard_format,
    }
    trace = TraceSpec(sites=(SITES[1], SITES[0]), site_widths=(5, 2))
    spec = make_spec(rows, trace=trace, **asked)
    dataset = expect_same(open_store(f"memory://p-{next(_names)}"), spec, rows, attempt)
    expect_values(dataset, spec, [row for row in rows if row.failure is None])
    plain = make_spec(rows, **asked)
    without = expect_same(open_store(f"memory://p-{next(_names)}"), plain, rows, attempt)
    assert without.manifest.content_sha256 == dataset.manifest.content_sha256

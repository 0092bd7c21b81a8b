"""However a shard was chunked, its bytes are the same."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from dataset_builders import capture, features_of, make_rows, make_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from wllm_ray.dataset.reader import load_dataset
from wllm_ray.dataset.store import open_store
from wllm_ray.dataset.writer import commit_manifest, create_spec, stage_shard
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


@settings(max_examples=60, deadline=None)
@given(
    attempts(),
    st.sampled_from(["last_prompt", "all_prompt", "mean_prompt", "index:0,-1"]),
    st.sampled_from([((4,), "stacked"), ((4, 4), "stacked"), ((4, 4), "per_site"), ((2, 5), None)]),
)
def test_any_chunking_gives_the_same_bytes(attempt, position, layout):
    failed, runs, lost = attempt
    widths, layout = layout
    rows = make_rows(7, failed=failed)
    spec = make_spec(
        rows,
        per_shard=7,
        position=position,
        sites=("embed", "L1_attn_out_prelinear")[: len(widths)],
        site_widths=widths,
        shard_layout=layout or "per_site",
    )
    chunks = [
        capture(rows[start:stop], spec, failures={i: LOST for i in lost if start <= i < stop})
        for start, stop in runs
    ]
    chunks += [capture([rows[i]], spec) for i in sorted(lost, reverse=True)]
    store = open_store(f"memory://property-{next(_names)}")
    whole = stage_shard(store, spec, 0, rows, [capture(rows, spec)])
    again = stage_shard(store, spec, 0, rows, chunks)
    assert again.receipt.files == whole.receipt.files
    assert not again.superseded

    create_spec(store, spec)
    commit_manifest(store, "d")
    dataset = load_dataset(store, "d", verify="full")
    good = [row for row in rows if row.failure is None]
    assert dataset.row_ids == [row.id for row in good]
    expected = [features_of(row, spec) for row in good]
    side_by_side = np.concatenate([dataset.site(site) for site in spec.sites], axis=1)
    assert np.array_equal(side_by_side, np.concatenate(expected))
    for index, one in enumerate(expected):
        start, stop = dataset.offsets[index : index + 2]
        assert np.array_equal(side_by_side[start:stop], one)

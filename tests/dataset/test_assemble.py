"""Every row exactly once: what a shard may be put together from, and what it may not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from dataset_builders import HIDDEN, capture, features_of, make_rows, make_spec, value_of

from wllm_ray.dataset.format.dtypes import all_finite
from wllm_ray.dataset.writing.assemble import assemble_shard
from wllm_ray.errors import ConflictError, IntegrityError
from wllm_ray.records import RowFailure

pytestmark = pytest.mark.requirement("D-10")

LOST = RowFailure.of("replica_lost", "gone")
LATE = RowFailure.of("deadline_exceeded", "slow")
POISON = RowFailure.of("poisonous", "three times")


@pytest.fixture
def rows():
    return make_rows(4)


@pytest.fixture
def spec(rows):
    return make_spec(rows, per_shard=4)


def joined(assembled):
    return np.concatenate(assembled.features)


def refused(match, spec, rows, chunks, code="rows_inconsistent"):
    with pytest.raises(IntegrityError, match=match) as error:
        assemble_shard(spec, 0, rows, chunks)
    assert error.value.code == code
    assert error.value.stage == "stage_shard"


def test_chunks_in_any_order_give_rows_in_order(spec, rows):
    chunks = [capture(rows[2:], spec), capture(rows[:2], spec)]
    assembled = assemble_shard(spec, 0, rows, chunks)
    assert np.array_equal(joined(assembled), [value_of(i) for i in range(4)])
    assert assembled.rows.offsets.tolist() == [0, 1, 2, 3]


def test_chunks_that_interleave(spec, rows):
    chunks = [capture(rows[1::2], spec), capture(rows[::2], spec)]
    assembled = assemble_shard(spec, 0, rows, chunks)
    assert np.array_equal(joined(assembled), [value_of(i) for i in range(4)])


def test_a_whole_chunk_is_not_copied(spec, rows):
    chunk = capture(rows, spec)
    (block,) = assemble_shard(spec, 0, rows, [chunk]).features
    assert np.shares_memory(block, chunk.features)


def test_a_failed_row_shifts_nobody(rows):
    rows = make_rows(4, failed=[1])
    spec = make_spec(rows, per_shard=4)
    chunk = capture(rows, spec, failures={2: POISON})
    assembled = assemble_shard(spec, 0, rows, [chunk])
    found = assembled.rows
    assert found.statuses == ["ok", "too_long", "poisonous", "ok"]
    assert found.lengths.tolist() == [1, 0, 0, 1]
    assert found.offsets.tolist() == [0, 0, 0, 1]
    assert np.array_equal(joined(assembled), [value_of(0), value_of(3)])
    assert (len(assembled.rows.failures), assembled.feature_rows) == (2, 2)
    assert assembled.transient == {}


@pytest.mark.requirement("C-3")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_fails_its_row_with_the_place(spec, rows, bad):
    values = value_of(2)[None].copy()
    values[0, 3] = bad
    assembled = assemble_shard(spec, 0, rows, [capture(rows, spec, features={2: values})])
    failure = assembled.rows.failures[2]
    assert (failure.code, failure.permanent) == ("non_finite", True)
    assert "L1_resid_post holds NaN or infinity, first at feature row 0 of the row" in (
        failure.message
    )
    assert "component 3" in failure.message
    assert np.array_equal(joined(assembled), [value_of(i) for i in (0, 1, 3)])


@pytest.mark.requirement("C-3")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_value_among_many_is_found_wherever_it_is(bad):
    values = np.full(300_001, -1e-30, np.float32)
    values[1] = np.finfo(np.float32).max  # whose square has no room
    assert all_finite(values, "float32")
    for place in (0, 1, 150_000, 300_000):
        wrong = values.copy()
        wrong[place] = bad
        assert not all_finite(wrong, "float32")
        wrong[1] = 1.0 if place != 1 else bad
        assert not all_finite(wrong, "float32")


@pytest.mark.requirement("C-3")
def test_a_row_of_zeros_fails(spec, rows):
    zeros = np.zeros((1, HIDDEN), np.float32)
    almost = zeros.copy()
    almost[0, 3] = 1e-30
    chunk = capture(rows, spec, features={1: zeros, 2: almost})
    assembled = assemble_shard(spec, 0, rows, [chunk])
    assert assembled.rows.statuses == ["ok", "all_zero", "ok", "ok"]


TWO_SITES = {
    "per_site": {"sites": ("embed", "L1_attn_out_prelinear"), "site_widths": (4, 6)},
    "stacked": {"sites": ("embed", "L1_attn_out"), "site_widths": (5, 5)},
}


@pytest.mark.requirement("C-3")
@pytest.mark.parametrize("layout", TWO_SITES)
@pytest.mark.parametrize(("site", "component"), [(0, 0), (0, 3), (1, 0), (1, 4)])
def test_what_must_not_be_stored_names_site_and_place(rows, layout, site, component):
    """At each end of each site, so that a column is not taken for its neighbour's."""
    spec = make_spec(rows, per_shard=4, position="all_prompt", **TWO_SITES[layout])
    column = component + site * spec.site_widths[0]
    values = features_of(rows[2], spec)  # 4 tokens
    values[3, column] = np.inf
    zeros = features_of(rows[1], spec)  # 3 tokens
    start = site * spec.site_widths[0]
    zeros[1, start : start + spec.site_widths[site]] = 0
    chunk = capture(rows, spec, features={1: zeros, 2: values})
    failures = assemble_shard(spec, 0, rows, [chunk]).rows.failures
    zero, infinite = failures[1], failures[2]
    assert zero.code == "all_zero"
    assert zero.message == f"every value of {spec.sites[site]} is zero at feature row 1 of the row"
    assert infinite.code == "non_finite"
    assert infinite.message == (
        f"{spec.sites[site]} holds NaN or infinity, first at feature row 3 of the row, "
        f"component {component}"
    )


@pytest.mark.requirement("C-3")
def test_a_vector_that_only_begins_with_zero_is_good(rows):
    spec = make_spec(rows, per_shard=4, position="all_prompt", **TWO_SITES["per_site"])
    values = features_of(rows[2], spec)
    values[:, [0, 4]] = 0
    values[2, 1:3] = 0
    assembled = assemble_shard(spec, 0, rows, [capture(rows, spec, features={2: values})])
    assert assembled.rows.statuses == ["ok"] * 4


def test_transient_failures_are_reported(spec, rows):
    assembled = assemble_shard(spec, 0, rows, [capture(rows, spec, failures={1: LOST, 2: POISON})])
    assert assembled.transient == {1: LOST}


def test_a_retry_beats_a_transient_failure_in_any_order(spec, rows):
    first = capture(rows, spec, failures={1: LOST, 2: LATE})
    again = capture(rows[1:2], spec)
    poisoned = capture(rows[2:3], spec, failures={2: POISON})
    for chunks in ([first, again, poisoned], [poisoned, again, first]):
        assembled = assemble_shard(spec, 0, rows, chunks)
        assert assembled.rows.statuses == ["ok", "ok", "poisonous", "ok"]
        assert assembled.transient == {}
        assert np.array_equal(joined(assembled), [value_of(i) for i in (0, 1, 3)])


def test_the_latest_transient_failure_is_told(spec, rows):
    chunks = [capture(rows, spec, failures={1: LOST}), capture(rows[1:2], spec, failures={1: LATE})]
    assert assemble_shard(spec, 0, rows, chunks).transient == {1: LATE}


def test_captured_twice(spec, rows):
    refused("row 0 was captured twice", spec, rows, [capture(rows, spec), capture(rows[:1], spec)])


def test_captured_and_failed_for_good(spec, rows):
    chunks = [capture(rows, spec), capture(rows[:1], spec, failures={0: POISON})]
    refused("row 0 was captured and failed for good", spec, rows, chunks)


def test_a_row_that_nobody_captured(spec, rows):
    refused(r"rows \[3\] \(1 in all\) were neither", spec, rows, [capture(rows[:3], spec)])


def test_a_row_of_another_shard(spec, rows):
    extra = make_rows(5)
    refused("row 4, which is not in this shard", spec, rows, [capture(extra, spec)])


def test_a_row_that_no_dataset_has(spec, rows):
    least = np.iinfo(np.int64).min
    chunk = replace(capture(rows[:1], spec), row_index=np.array([least]))
    later = make_rows(8)
    spec = make_spec(later, per_shard=4)
    with pytest.raises(IntegrityError, match=f"row {least}, which is not in this shard"):
        assemble_shard(spec, 1, later[4:], [chunk])


@pytest.mark.parametrize("dtype", ["uint64", "int32", "uint8"])
def test_integers_of_other_dtypes_name_the_same_rows(spec, rows, dtype):
    chunk = capture(rows, spec)
    same = {name: getattr(chunk, name).astype(dtype) for name in ("row_index", "lengths")}
    assembled = assemble_shard(spec, 0, rows, [replace(chunk, **same)])
    assert np.array_equal(joined(assembled), chunk.features)


def test_a_row_that_had_failed_already(rows):
    failed = make_rows(4, failed=[1])
    spec = make_spec(failed, per_shard=4)
    refused("row 1, which failed before it was sent", spec, failed, [capture(rows, spec)])


def test_length_and_failure_must_agree(spec, rows):
    chunk = capture(rows, spec)
    refused(
        "row 1 failed, but a chunk holds 1 feature rows",
        spec,
        rows,
        [replace(chunk, failures={1: POISON})],
    )
    lacking = replace(capture(rows, spec, failures={1: POISON}), failures={})
    refused("row 1 has no failure, but a chunk holds 0", spec, rows, [lacking])
    refused(r"failures of rows \[9\]", spec, rows, [replace(chunk, failures={9: POISON})])


def test_wrong_width_dtype_or_count(spec, rows):
    chunk = capture(rows, spec)
    wrong = (
        chunk.features[:, :3],
        np.concatenate([chunk.features] * 2, axis=1),
        chunk.features[:3],
        chunk.features.astype(np.float64),
        chunk.features.astype(">f4"),
    )
    for bad in (
        *(replace(chunk, features=features) for features in wrong),
        replace(chunk, widths=(HIDDEN - 1, 1)),
    ):
        refused("expected captured features of shape", spec, rows, [bad], code="array_invalid")


def test_lengths_must_fit_row_index(spec, rows):
    chunk = replace(capture(rows, spec), lengths=np.array([2, 2], np.int64))
    refused("do not belong together", spec, rows, [chunk])
    chunk = replace(capture(rows, spec), lengths=np.array([2, -1, 2, 1], np.int64))
    refused("do not belong together", spec, rows, [chunk])


def test_features_that_are_not_contiguous_are_accepted(spec, rows):
    chunk = capture(rows, spec)
    wide = np.concatenate([chunk.features] * 2, axis=1)[:, :HIDDEN]
    assembled = assemble_shard(spec, 0, rows, [replace(chunk, features=wide)])
    assert np.array_equal(joined(assembled), chunk.features)
    assert joined(assembled).flags.c_contiguous


def test_rows_must_be_those_of_the_spec(spec, rows):
    chunks = [capture(rows, spec)]
    refused("expected rows 0 to 3, each once and in order", spec, rows[:3], chunks)
    refused("expected rows 0 to 3, each once and in order", spec, rows[::-1], chunks)
    changed = [*rows[:3], rows[3]._replace(request_digest="0" * 64)]
    refused("the input is not the one that the dataset was begun with", spec, changed, chunks)
    with pytest.raises(IntegrityError, match="shard 1 does not exist"):
        assemble_shard(spec, 1, rows, chunks)


@pytest.mark.requirement("D-7")
def test_engines_that_may_differ(spec, rows):
    chunks = [capture(rows[:2], spec), capture(rows[2:], spec, device="gpu")]
    with pytest.raises(ConflictError, match=r"may differ numerically \(device\)") as error:
        assemble_shard(spec, 0, rows, chunks)
    assert error.value.code == "mixed_fingerprints"
    with pytest.raises(ConflictError, match="from the spec's"):
        assemble_shard(spec, 0, rows, [capture(rows, spec, model_revision="c" * 40)])


def test_token_ids_may_come_from_the_engine(spec, rows):
    bare = [row._replace(token_ids=None) for row in rows]
    chunk = replace(capture(rows, spec), token_ids={row.index: row.token_ids for row in rows})
    theirs = assemble_shard(spec, 0, bare, [chunk])
    ours = assemble_shard(spec, 0, rows, [capture(rows, spec)])
    assert theirs.rows.token_digests == ours.rows.token_digests
    refused("nobody recorded its token ids", spec, bare, [capture(rows, spec)])


@pytest.mark.requirement("C-2")
def test_other_token_ids_than_were_sent(spec, rows):
    chunk = replace(capture(rows, spec), token_ids={2: np.array([7], np.int32)})
    refused("row 2: the engine ran other token ids than were sent", spec, rows, [chunk])


def test_the_position_decides_how_many_feature_rows(rows):
    spec = make_spec(rows, per_shard=4, position="all_prompt")
    assembled = assemble_shard(spec, 0, rows, [capture(rows, spec)])
    assert assembled.rows.lengths.tolist() == [2, 3, 4, 2]
    one_each = capture(rows, make_spec(rows, per_shard=4))
    refused("position all_prompt of 2 tokens cannot give 1", spec, rows, [one_each])
    last = make_spec(rows, per_shard=4)
    refused("cannot give 2 feature rows", last, rows, [capture(rows, spec)])
    ends = make_spec(rows, per_shard=4, position="index:0,-1")
    refused("position index:0,-1 of 3 tokens cannot give 3", ends, rows, [capture(rows, spec)])
    mean = make_spec(rows, per_shard=4, position="mean_prompt")
    refused("position mean_prompt of 2 tokens cannot give 2", mean, rows, [capture(rows, spec)])


def test_a_shard_without_a_good_row():
    rows = make_rows(2, failed=[0, 1])
    spec = make_spec(rows)
    assembled = assemble_shard(spec, 0, rows, [])
    assert (assembled.features, assembled.feature_rows) == ((), 0)
    assert len(assembled.rows.failures) == 2


def test_the_first_permanent_failure_stands(spec, rows):
    zero = RowFailure.of("all_zero", "zero")
    chunks = [
        capture(rows, spec, failures={1: POISON}),
        capture(rows[1:2], spec, failures={1: zero}),
        capture(rows[1:2], spec, failures={1: LOST}),
    ]
    assert assemble_shard(spec, 0, rows, chunks).rows.failures[1] == POISON

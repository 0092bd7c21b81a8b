"""A chunk leaves only when each wanted value came exactly once."""

import numpy as np
import pytest

from wllm_ray.capture.coverage import ChunkCapture, RowsWanted, SitesWanted
from wllm_ray.sites import HookSite

pytestmark = pytest.mark.requirement("C-3")


LATE, EARLY = HookSite(7, "resid_post"), HookSite(3, "attn_out_prelinear")
WIDTHS = {LATE: 4, EARLY: 6}


def a_chunk(*, mean=False, orders=(None, None)):
    """Two rows: positions 1 and 4 of the first, position 2 of the second; two unlike sites."""
    rows = [
        RowsWanted(10, np.arange(5, dtype=np.int32), np.array([1, 4]), orders[0]),
        RowsWanted(11, np.arange(3, dtype=np.int32), np.array([2]), orders[1]),
    ]
    wanted = SitesWanted((LATE, EARLY), (4, 6), depth=7, mean=mean)
    return ChunkCapture(wanted, rows, ["a", "b"])


def fill(chunk, sites=(LATE, EARLY), slots=(0, 1, 2)):
    """Each value says its site and its slot."""
    for site in sites:
        values = np.array([[10.0 * site.layer + slot] * WIDTHS[site] for slot in slots])
        chunk.write(site, np.array(slots), values.astype(np.float32))


def codes(chunk):
    chunk.prove()
    return [row.failure.code if row.failure else None for row in chunk.rows]


def test_a_whole_chunk():
    chunk = a_chunk()
    fill(chunk)
    assert codes(chunk) == [None, None]
    assert chunk.features.shape == (3, 10)
    assert chunk.features.tolist() == [[70 + i] * 4 + [30 + i] * 6 for i in range(3)]
    assert chunk.values(chunk.rows[1], EARLY).tolist() == [[32] * 6]
    assert [chunk.feature_rows(row) for row in chunk.rows] == [2, 1]
    assert chunk.good_rows() is chunk.features


def test_a_missing_value_names_position_and_site():
    chunk = a_chunk()
    fill(chunk)
    chunk.counts[1, 1] = 0
    assert codes(chunk) == ["position_missing", None]
    assert chunk.rows[0].failure.message == "position 4 of L3_attn_out_prelinear was not captured"


def test_a_value_that_came_twice():
    chunk = a_chunk()
    fill(chunk)
    fill(chunk, sites=(LATE,), slots=(2,))
    assert codes(chunk) == [None, "position_repeated"]
    assert "position 2 of L7_resid_post" in chunk.rows[1].failure.message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite(value):
    chunk = a_chunk()
    fill(chunk)
    chunk.features[2, 3] = value
    assert codes(chunk) == [None, "non_finite"]
    assert chunk.rows[1].failure.message == (
        "position 2 of L7_resid_post is not finite, first at hidden index 3"
    )


def test_a_vector_of_zeros():
    chunk = a_chunk()
    fill(chunk)
    chunk.features[0, 4:] = 0
    assert codes(chunk) == ["all_zero", None]


def test_the_first_reason_stands():
    chunk = a_chunk()
    fill(chunk, slots=(2,))
    chunk.rows[0].fail("hook_failed", "planted")
    chunk.rows[0].fail("engine_failed", "later")
    assert codes(chunk) == ["hook_failed", None]
    assert chunk.rows[0].failure.message == "planted"


@pytest.mark.requirement("C-10")
def test_a_bad_value_deep_in_a_ragged_row_fails_that_row_and_names_its_place():
    """Site, position and index inside the site; not the column of the buffer."""
    lengths = [3, 40, 5]
    rows = [
        RowsWanted(i, np.arange(n, dtype=np.int32), np.arange(n)) for i, n in enumerate(lengths)
    ]
    wanted = SitesWanted((LATE, EARLY), (4, 6), depth=7)
    chunk = ChunkCapture(wanted, rows, ["a", "b", "c"])
    fill(chunk, slots=range(48))
    chunk.features[3 + 17, 4 + 2] = np.inf
    chunk.features[3 + 18, 0] = np.nan
    assert codes(chunk) == [None, "non_finite", None]
    assert chunk.rows[1].failure.message == (
        "position 17 of L3_attn_out_prelinear is not finite, first at hidden index 2"
    )
    assert chunk.good_rows()[:, 0].tolist() == [70, 71, 72, 113, 114, 115, 116, 117]


@pytest.mark.requirement("C-8")
def test_rows_come_back_in_the_order_that_was_asked_for():
    chunk = a_chunk(orders=(np.array([1, 0, 1]), np.array([0, 0])))
    fill(chunk)
    assert codes(chunk) == [None, None]
    assert chunk.good_rows()[:, 0].tolist() == [71, 70, 71, 72, 72]
    assert [chunk.feature_rows(row) for row in chunk.rows] == [3, 2]


@pytest.mark.requirement("C-8")
def test_a_mean_is_added_up_position_by_position_in_float32():
    """Not pairwise, and not in float64: the order is part of what the number is."""
    count = 3000
    row = RowsWanted(0, np.arange(count, dtype=np.int32), np.arange(count))
    chunk = ChunkCapture(SitesWanted((LATE,), (4,), depth=7, mean=True), [row], ["a"])
    values = np.random.default_rng(1).normal(3, 100, (count, 4)).astype(np.float32)
    chunk.write(LATE, np.arange(count), values)
    assert codes(chunk) == [None]
    total = np.zeros(4, dtype=np.float32)
    for one in values:
        total = total + one
    assert chunk.good_rows().tolist() == [(total / np.float32(count)).tolist()]
    assert not np.array_equal(total, values.sum(axis=0, dtype=np.float64).astype(np.float32))
    assert chunk.feature_rows(chunk.rows[0]) == 1


@pytest.mark.requirement("C-8")
def test_a_mean_of_a_row_that_lacks_a_position_does_not_exist():
    chunk = a_chunk(mean=True)
    fill(chunk, slots=(0, 2))
    assert codes(chunk) == ["position_missing", None]
    assert chunk.good_rows().tolist() == [[72] * 4 + [32] * 6]


def test_a_chunk_without_good_rows_or_without_rows():
    chunk = a_chunk()
    chunk.prove()
    assert chunk.good_rows().shape == (0, 10)
    empty = ChunkCapture(SitesWanted((LATE,), (4,), depth=7), [], [])
    empty.prove()
    assert empty.good_rows().shape == (0, 4)

"""Which rows share a shard and a chunk."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wllm_ray.plan import (
    AUTO_CHUNK_ROWS,
    AUTO_CHUNK_TOKENS,
    LEAST_TOKENS_PER_LANE,
    ShardLimits,
    chunk_tokens,
    plan_chunks,
)
from wllm_ray.records import RowRecord


def row(index: int, tokens: int | None = 3, bound: int = 3) -> RowRecord:
    ids = None if tokens is None else np.zeros(tokens, np.int32)
    return RowRecord(index, f"r{index}", "{}", "0" * 64, bound, ids, None)


def rows_of(tokens) -> list[RowRecord]:
    return [row(index, count) for index, count in enumerate(tokens)]


# --- shards ---------------------------------------------------------------------------------------


@pytest.mark.requirement("D-8")
@given(
    sizes=st.lists(st.integers(0, 50), max_size=60),
    max_rows=st.integers(1, 20),
    max_bytes=st.integers(1, 100),
)
def test_a_shard_keeps_both_bounds_and_is_as_full_as_it_can_be(sizes, max_rows, max_bytes):
    limits = ShardLimits(max_rows, max_bytes)
    shards = list(limits.cut(enumerate(sizes)))
    assert [index for shard in shards for index in shard] == list(range(len(sizes)))
    for shard in shards:
        assert 1 <= len(shard) <= max_rows
        assert sum(sizes[index] for index in shard) <= max_bytes or len(shard) == 1
    for shard, following in itertools.pairwise(shards):
        one_more = [*shard, following[0]]
        assert len(one_more) > max_rows or sum(sizes[index] for index in one_more) > max_bytes


@pytest.mark.requirement("D-8")
@pytest.mark.parametrize(
    ("row_bytes", "expected"), [(1, 4096), (16 * 1024, 4096), (32 * 1024, 2048), (2**30, 1)]
)
def test_rows_of_one_size_fill_the_default_shard(row_bytes, expected):
    shard = next(ShardLimits().cut((index, row_bytes) for index in range(5000)))
    assert len(shard) == expected


def test_shards_are_cut_while_the_source_is_read():
    read = []
    shards = ShardLimits(max_rows=10).cut((read.append(index) or index, 1) for index in range(100))
    assert next(shards) == list(range(10))
    assert len(read) == 11


# --- chunks ---------------------------------------------------------------------------------------


@pytest.mark.requirement("C-15")
@given(
    tokens=st.lists(st.integers(1, 9000), max_size=80),
    batch_size=st.one_of(st.just("auto"), st.integers(1, 70)),
    lanes=st.integers(1, 20),
)
def test_chunks_keep_every_row_once_in_order_and_within_bounds(tokens, batch_size, lanes):
    rows = rows_of(tokens)
    chunks = plan_chunks(7, rows, batch_size, lanes=lanes)
    assert [one for chunk in chunks for one in chunk.rows] == rows
    for chunk in chunks:
        assert chunk.shard == 7
        assert chunk.first_row == chunk.rows[0].index
        assert len(chunk.rows) <= (AUTO_CHUNK_ROWS if batch_size == "auto" else batch_size)
        if batch_size == "auto":
            assert chunk_tokens(chunk) <= AUTO_CHUNK_TOKENS or len(chunk.rows) == 1
    if batch_size != "auto":
        assert [len(chunk.rows) for chunk in chunks[:-1]] == [batch_size] * (len(chunks) - 1)


@pytest.mark.requirement("C-15")
@given(
    tokens=st.lists(st.integers(1, 600), min_size=16, max_size=60),
    lanes=st.integers(1, 16),
)
def test_no_lane_is_left_without_a_chunk_and_none_gets_much_more_than_its_share(tokens, lanes):
    """A long row cannot be split, so shares are equal but for about a row on either side."""
    chunks = plan_chunks(0, rows_of(tokens), "auto", lanes=lanes)
    worth = sum(tokens) // LEAST_TOKENS_PER_LANE
    assert len(chunks) >= min(lanes, worth)
    if len(chunks) == lanes:
        assert max(map(chunk_tokens, chunks)) <= sum(tokens) / lanes + 2 * max(tokens)


@pytest.mark.requirement("C-15")
def test_rows_of_one_length_are_shared_out_evenly():
    """64 rows would make one chunk, and leave seven of eight replicas idle."""
    chunks = plan_chunks(0, rows_of([50] * 64), "auto", lanes=8)
    assert [len(chunk.rows) for chunk in chunks] == [8] * 8
    assert len(plan_chunks(0, rows_of([50] * 64), "auto")) == 1


@pytest.mark.requirement("C-15")
def test_one_long_row_does_not_starve_the_lanes_of_the_others():
    chunks = plan_chunks(0, rows_of([8000, *[40] * 63]), "auto", lanes=8)
    assert [len(chunk.rows) for chunk in chunks] == [1, *[9] * 7]


def test_what_is_too_little_for_a_call_is_not_shared_out():
    assert len(plan_chunks(0, rows_of([3] * 20), "auto", lanes=8)) == 1
    assert len(plan_chunks(0, rows_of([LEAST_TOKENS_PER_LANE] * 2), "auto", lanes=8)) == 2


def test_rows_without_ids_count_as_many_tokens_as_they_may_have():
    rows = [row(index, None, bound=2000) for index in range(8)]
    assert [len(chunk.rows) for chunk in plan_chunks(0, rows, "auto")] == [4, 4]
    short = [row(index, None, bound=3) for index in range(130)]
    assert max(len(chunk.rows) for chunk in plan_chunks(0, short, "auto")) <= AUTO_CHUNK_ROWS


def test_nothing_gives_no_chunk():
    assert plan_chunks(0, []) == ()
    assert plan_chunks(0, [], 4) == ()

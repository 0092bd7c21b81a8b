"""Which rows share a shard and a chunk."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wllm_ray.plan import AUTO_CHUNK_ROWS, AUTO_CHUNK_TOKENS, ShardLimits, plan_chunks, plan_shards
from wllm_ray.records import RowFailure, RowRecord


def row(index: int, tokens: int | None = 3) -> RowRecord:
    failure = None if tokens else RowFailure.of("empty_prompt", "x")
    ids = None if tokens is None else np.zeros(tokens, np.int32)
    return RowRecord(index, f"r{index}", "{}", "0" * 64, ids, failure)


@pytest.mark.requirement("D-8")
@given(count=st.integers(0, 60), size=st.integers(1, 20))
def test_shards_are_fixed_by_row_index_alone(count, size):
    shards = list(plan_shards((row(n) for n in range(count)), size))
    assert [one.index for shard in shards for one in shard.rows] == list(range(count))
    assert [shard.index for shard in shards] == list(range(len(shards)))
    assert all(len(shard.rows) == size for shard in shards[:-1])
    assert all(shard.first_row == shard.index * size for shard in shards)


@pytest.mark.requirement("D-8")
@pytest.mark.parametrize(
    ("row_bytes", "expected"), [(1, 4096), (16 * 1024, 4096), (32 * 1024, 2048), (2**30, 1)]
)
def test_a_shard_keeps_both_bounds(row_bytes, expected):
    assert ShardLimits().rows_per_shard(row_bytes) == expected


def test_shards_are_read_from_the_source_one_at_a_time():
    read = []
    shards = plan_shards((read.append(n) or row(n) for n in range(100)), 10)
    next(shards)
    assert len(read) == 10


@pytest.mark.requirement("C-15")
@given(
    tokens=st.lists(st.integers(1, 9000), max_size=80),
    batch_size=st.one_of(st.just("auto"), st.integers(1, 70)),
)
def test_chunks_keep_every_row_once_in_order_and_within_bounds(tokens, batch_size):
    rows = [row(n, count) for n, count in enumerate(tokens)]
    chunks = plan_chunks(7, rows, batch_size)
    assert [one for chunk in chunks for one in chunk.rows] == rows
    for chunk in chunks:
        total = sum(len(one.token_ids) for one in chunk.rows)
        assert chunk.shard == 7
        assert chunk.first_row == chunk.rows[0].index
        assert len(chunk.rows) <= (AUTO_CHUNK_ROWS if batch_size == "auto" else batch_size)
        if batch_size == "auto":
            assert total <= AUTO_CHUNK_TOKENS or len(chunk.rows) == 1


def test_rows_without_ids_are_bounded_by_their_number():
    chunks = plan_chunks(0, [row(n, None) for n in range(130)], "auto")
    assert [len(chunk.rows) for chunk in chunks] == [64, 64, 2]


def test_nothing_gives_no_chunk():
    assert plan_chunks(0, []) == ()

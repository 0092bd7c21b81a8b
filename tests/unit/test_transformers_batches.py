"""Which rows share a forward pass."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wllm_ray.capture.transformers_batches import BatchLimits, batch_limits, pad, plan_batches
from wllm_ray.errors import InvalidInputError

pytestmark = pytest.mark.requirement("C-13")


@given(
    lengths=st.lists(st.integers(1, 50), max_size=40),
    rows=st.integers(1, 9),
    tokens=st.none() | st.integers(1, 120),
    edge=st.none() | st.integers(1, 50),
)
def test_every_row_runs_once_within_the_limits_the_longest_first(lengths, rows, tokens, edge):
    batches = plan_batches(lengths, BatchLimits(rows, tokens, edge))
    assert sorted(row for batch in batches for row in batch) == list(range(len(lengths)))
    run = [lengths[row] for batch in batches for row in batch]
    assert run == sorted(lengths, reverse=True)
    for batch in batches:
        longest = lengths[batch[0]]
        assert len(batch) <= rows
        assert len(batch) == 1 or tokens is None or longest * len(batch) <= tokens
        assert edge is None or len({lengths[row] > edge for row in batch}) == 1


def test_no_pass_is_smaller_than_it_must_be():
    assert plan_batches([3, 9, 3, 4], BatchLimits(rows=2)) == [[1, 3], [0, 2]]
    assert plan_batches([4, 4, 4, 4, 2], BatchLimits(8, 12)) == [[0, 1, 2], [3, 4]]
    assert plan_batches([50], BatchLimits(8, 12)) == [[0]]
    assert plan_batches([], BatchLimits(8)) == []


def test_limits_by_number_or_by_device():
    assert batch_limits(7, "cpu", apart_at=4096) == BatchLimits(7, None, 4096)
    assert batch_limits("auto", "cuda").padded_tokens > batch_limits("auto", "cpu").padded_tokens
    for wrong in (0, -1, 1.5, "many", True, None):
        with pytest.raises(InvalidInputError, match="'auto' or the most rows of one forward pass"):
            batch_limits(wrong, "cpu")


def test_padding_stands_behind_the_prompt():
    padded = pad([np.array([5, 6, 7], np.int32), np.array([8], np.int32)])
    assert padded.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert padded.dtype == np.int64

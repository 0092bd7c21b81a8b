"""A chunk leaves only when each wanted value came exactly once."""

import numpy as np
import pytest

from wllm_ray.capture.coverage import ChunkCapture, RowsWanted

pytestmark = pytest.mark.requirement("C-3")


def a_chunk():
    """Two rows: positions 1 and 4 of the first, position 2 of the second; blocks 7 and 3."""
    rows = [
        RowsWanted(10, np.arange(5, dtype=np.int32), np.array([1, 4])),
        RowsWanted(11, np.arange(3, dtype=np.int32), np.array([2])),
    ]
    return ChunkCapture((7, 3), rows, ["a", "b"], 4)


def fill(chunk, layers=(7, 3), slots=(0, 1, 2)):
    for layer in layers:
        chunk.write(layer, np.array(slots), np.full((len(slots), 4), layer, dtype=np.float32))


def codes(chunk):
    chunk.prove()
    return [row.failure.code if row.failure else None for row in chunk.rows]


def test_a_whole_chunk():
    chunk = a_chunk()
    fill(chunk)
    assert codes(chunk) == [None, None]
    assert chunk.features[:, :, 0].tolist() == [[7, 3]] * 3
    assert [chunk.features[row.slots].shape[0] for row in chunk.rows] == [2, 1]


def test_a_missing_value_names_position_and_block():
    chunk = a_chunk()
    fill(chunk)
    chunk.counts[1, 1] = 0
    assert codes(chunk) == ["position_missing", None]
    assert chunk.rows[0].failure.message == "position 4 of block 3 was not captured"


def test_a_value_that_came_twice():
    chunk = a_chunk()
    fill(chunk)
    fill(chunk, layers=(7,), slots=(2,))
    assert codes(chunk) == [None, "position_repeated"]
    assert "position 2 of block 7" in chunk.rows[1].failure.message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite(value):
    chunk = a_chunk()
    fill(chunk)
    chunk.features[2, 0, 3] = value
    assert codes(chunk) == [None, "non_finite"]
    assert chunk.rows[1].failure.message == (
        "position 2 of block 7 is not finite, first at hidden index 3"
    )


def test_a_vector_of_zeros():
    chunk = a_chunk()
    fill(chunk)
    chunk.features[0, 1] = 0
    assert codes(chunk) == ["all_zero", None]


def test_the_first_reason_stands():
    chunk = a_chunk()
    fill(chunk, slots=(2,))
    chunk.rows[0].fail("hook_failed", "planted")
    chunk.rows[0].fail("engine_failed", "later")
    assert codes(chunk) == ["hook_failed", None]
    assert chunk.rows[0].failure.message == "planted"

"""Which tokens are kept: every position, one after the other and side by side."""

import asyncio
from itertools import pairwise

import numpy as np
import pytest
from conftest import SPLIT, idle, prompts_of, relative_l2, task_of

from wllm_ray.positions import resolve

pytestmark = pytest.mark.requirement("C-8", "C-2")

TIGHT = 1e-4
SITES = ("L0_resid_post", "L2_attn_out_prelinear", "L3_resid_post")
LENGTHS = [1, 2, 9, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 1, 1, 30]
PROMPTS = prompts_of(LENGTHS, seed=31)


@pytest.fixture(scope="module")
def truth(reference):
    """Prompt → [tokens, sum(widths)] of SITES, from Transformers; each worked out once."""
    model, known = reference("qwen3"), {}

    def rows(prompt):
        key = prompt.tobytes()
        if key not in known:
            found = model.sites(prompt)
            known[key] = np.concatenate([found[site] for site in SITES], axis=1)
        return known[key]

    return rows


def capture(engine, prompts, position):
    return engine.capture(task_of(prompts, sites=SITES, position=position))


@pytest.mark.parametrize(
    "position", ["last_prompt", "first", "all_prompt", "index:-1", "index:0,-1", "index:-1,0"]
)
def test_each_position_is_the_rows_own(position, engine, truth):
    chunk = capture(engine, PROMPTS, position)
    expected = [truth(prompt)[resolve(position, len(prompt))] for prompt in PROMPTS]
    assert chunk.failures == {}
    assert chunk.lengths.tolist() == [len(rows) for rows in expected]
    for start, stop in pairwise(np.cumsum([0, *chunk.widths])):
        columns = slice(start, stop)
        found = chunk.features[:, columns]
        wanted = np.concatenate([rows[:, columns] for rows in expected])
        assert relative_l2(found, wanted).max() <= TIGHT
    assert idle(engine)


def test_positions_are_cuts_of_one_another_to_the_bit(engine):
    whole = capture(engine, PROMPTS, "all_prompt")
    starts = np.cumsum([0, *whole.lengths[:-1]])
    ends = starts + whole.lengths
    assert np.array_equal(capture(engine, PROMPTS, "first").features, whole.features[starts])
    assert np.array_equal(
        capture(engine, PROMPTS, "last_prompt").features, whole.features[ends - 1]
    )
    both = np.stack([ends - 1, starts], axis=1).reshape(-1)
    assert np.array_equal(capture(engine, PROMPTS, "index:-1,0").features, whole.features[both])


def test_the_order_that_was_asked_for_is_kept(engine):
    """Not ascending, from both ends, and two names for one token."""
    (prompt,) = prompts_of([10], seed=32)
    whole = capture(engine, [prompt], "all_prompt").features
    found = capture(engine, [prompt], "index:7,-9,0,-3,9").features
    assert np.array_equal(found, whole[[7, 1, 0, 7, 9]])


def test_an_index_outside_a_row_fails_that_row_alone(engine):
    chunk = capture(engine, PROMPTS, "index:20,-2")
    assert chunk.failures.keys() == {0, 1, 2, 7}
    assert {one.code for one in chunk.failures.values()} == {"position_out_of_range"}
    assert all(one.permanent for one in chunk.failures.values())
    assert "index 20 is outside a row of 9 tokens" in chunk.failures[2].message
    assert chunk.lengths.tolist() == [0, 0, 0, 2, 2, 2, 2, 0, 2]
    good = [prompt for index, prompt in enumerate(PROMPTS) if index not in chunk.failures]
    assert np.array_equal(chunk.features, capture(engine, good, "index:20,-2").features)


def test_a_mean_is_that_of_all_positions_in_order_in_float32(engine):
    chunk = capture(engine, PROMPTS, "mean_prompt")
    whole = capture(engine, PROMPTS, "all_prompt")
    ends = np.cumsum(whole.lengths)
    means = []
    for start, end in zip(ends - whole.lengths, ends, strict=True):
        total = np.zeros(whole.features.shape[1], dtype=np.float32)
        for row in whole.features[start:end]:
            total = total + row
        means.append(total / np.float32(end - start))
    assert chunk.features.dtype == np.float32
    assert chunk.lengths.tolist() == [1] * len(PROMPTS)
    assert np.array_equal(chunk.features, np.stack(means))


def test_in_a_prompt_of_one_token_all_positions_are_one(engine, truth):
    prompts = prompts_of([1] * 11, seed=34)
    last = capture(engine, prompts, "last_prompt")
    expected = np.concatenate([truth(prompt) for prompt in prompts])
    assert last.features.shape == expected.shape
    assert relative_l2(last.features, expected).max() <= TIGHT
    for position in ("first", "all_prompt", "mean_prompt", "index:0", "index:-1"):
        assert np.array_equal(capture(engine, prompts, position).features, last.features)
    twice = capture(engine, prompts, "index:0,-1")
    assert twice.lengths.tolist() == [2] * len(prompts)
    assert np.array_equal(twice.features, last.features.repeat(2, axis=0))


@pytest.mark.requirement("D-3")
async def test_positions_share_passes_and_do_not_touch_each_others_bytes(engine):
    positions = ["last_prompt", "all_prompt", "mean_prompt", "first", "index:0,-1"]
    alone = [capture(engine, PROMPTS, position).features for position in positions]
    tasks = [task_of(PROMPTS, sites=SITES, position=position) for position in positions]
    together = await asyncio.gather(*(engine.capture_async(task) for task in tasks))
    for expected, chunk in zip(alone, together, strict=True):
        assert np.array_equal(chunk.features, expected)


@pytest.mark.requirement("C-3", "C-16")
def test_failures_in_the_middle_of_ragged_rows_shift_nothing(engine):
    """Row failures before, between and behind rows of many lengths."""
    none, outside = np.array([], dtype=np.int32), np.array([5, -1, 7], dtype=np.int32)
    good = prompts_of([3, 70, 1, 12], seed=33)
    prompts = [none, good[0], outside, good[1], good[2], none, good[3], outside]
    chunk = capture(engine, prompts, "all_prompt")
    assert chunk.failures.keys() == {0, 2, 5, 7}
    assert chunk.lengths.tolist() == [0, 3, 0, 70, 1, 0, 12, 0]
    assert np.array_equal(chunk.features, capture(engine, good, "all_prompt").features)

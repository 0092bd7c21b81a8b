"""The prefix cache is used where it cannot drop a wanted row, and passed over where it could."""

import numpy as np
import pytest
from conftest import idle, prompts_of, relative_l2, task_of

from wllm_ray.positions import resolve

pytestmark = pytest.mark.requirement("C-7", "C-2")

BLOCK = 32
TIGHT = 1e-4


@pytest.fixture(scope="module")
def cached(open_engine):
    with open_engine("qwen3", prefix_caching=True) as started:
        yield started


@pytest.fixture
def ran(cached, monkeypatch):
    """How many tokens each pass ran, fillers left out."""
    counts, capture = [], cached._loop.driver.capture
    begin = capture.begin

    def note(one_pass):
        counts.extend(
            int(count)
            for request, count in zip(one_pass.request_ids, one_pass.num_scheduled, strict=True)
            if "filler" not in request
        )
        begin(one_pass)

    monkeypatch.setattr(capture, "begin", note)
    return counts


def family(seed, tails=(5, 40, 1, 5), shared=3 * BLOCK):
    """Prompts with the same beginning."""
    beginning, *ends = prompts_of([shared, *tails], seed=seed)
    return [np.concatenate([beginning, end]) for end in ends]


def test_the_class_is_tolerance(cached):
    assert cached.description.fingerprint.reproducibility == "tolerance"


@pytest.mark.parametrize("position", ["last_prompt", "index:-1"])
def test_a_row_read_at_its_end_starts_from_what_others_left(position, cached, ran, reference):
    first, *others = family(seed=41 if position == "last_prompt" else 42)
    cached.capture(task_of([first], (3,), position=position))
    assert sum(ran) == len(first)
    ran.clear()
    chunk = cached.capture(task_of([*others, first], (3,), position=position))
    assert sum(ran) == sum(map(len, others)) + len(first) - 3 * BLOCK * 4
    expected = reference("qwen3").all_rows([*others, first])[:, 3]
    assert relative_l2(chunk.features, expected).max() <= TIGHT
    assert idle(cached)


def test_a_prompt_that_is_cached_whole_is_still_read_at_its_last_token(cached, ran, reference):
    (prompt,) = prompts_of([2 * BLOCK], seed=43)
    for _ in range(2):
        ran.clear()
        chunk = cached.capture(task_of([prompt], (3,)))
    assert 1 <= sum(ran) <= BLOCK
    assert relative_l2(chunk.features, reference("qwen3").all_rows([prompt])[:, 3]).max() <= TIGHT


@pytest.mark.parametrize(
    "position", ["all_prompt", "first", "mean_prompt", "index:0,-1", "index:40"]
)
def test_other_positions_compute_the_whole_row(position, cached, ran, reference):
    prompts = family(seed=44)
    cached.capture(task_of(prompts, (3,)))
    ran.clear()
    chunk = cached.capture(task_of([*prompts, prompts[0]], (3,), position=position))
    assert chunk.failures == {}
    assert sum(ran) == sum(map(len, prompts)) + len(prompts[0])
    model, expected = reference("qwen3"), []
    for prompt in [*prompts, prompts[0]]:
        rows = model.sites(prompt)["L3_resid_post"][resolve(position, len(prompt))]
        expected.append(rows.mean(axis=0, keepdims=True) if position == "mean_prompt" else rows)
    assert relative_l2(chunk.features, np.concatenate(expected)).max() <= TIGHT


def deep_after_shallow(engine, seed):
    """The stream after the last block, where a pass that ended at block 0 was there before."""
    (prompt,) = prompts_of([3 * BLOCK + 5], seed=seed)
    engine.capture(task_of([prompt], (0,)))
    return prompt, engine.capture(task_of([prompt], (3,))).features


@pytest.mark.requirement("C-6")
def test_what_a_shallow_pass_left_is_not_used_by_a_deeper_one(cached, ran, reference):
    prompt, found = deep_after_shallow(cached, seed=45)
    assert sum(ran) == 2 * len(prompt)
    assert relative_l2(found, reference("qwen3").all_rows([prompt])[:, 3]).max() <= TIGHT


@pytest.mark.requirement("C-6")
def test_without_a_salt_it_would_be_used_and_be_wrong(cached, reference, monkeypatch):
    """The control of the test above."""
    from vllm.v1 import engine as vllm_engine

    request = vllm_engine.EngineCoreRequest
    monkeypatch.setattr(
        vllm_engine, "EngineCoreRequest", lambda **fields: request(**fields | {"cache_salt": None})
    )
    prompt, found = deep_after_shallow(cached, seed=46)
    assert relative_l2(found, reference("qwen3").all_rows([prompt])[:, 3]).max() > 1e-2

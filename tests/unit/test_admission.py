"""Admission: whole prompts, fixed splits, nobody starved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wllm_ray.capture.admission import MIN_PASS_TOKENS, Admission, Limits

pytestmark = pytest.mark.requirement("D-3")

SPLIT, REQUESTS, BLOCK, BLOCKS = 64, 5, 16, 24


def run_all(lengths):
    """Run every prompt; returns the passes as {request: tokens}."""
    limits = Limits(SPLIT, REQUESTS, BLOCKS, lambda tokens: -(-tokens // BLOCK))
    admission = Admission(limits)
    for request, length in enumerate(lengths):
        admission.add(request, length)
    passes = []
    while len(admission):
        plan = admission.next_pass()
        assert sum(plan.tokens.values()) + plan.filler_tokens >= MIN_PASS_TOKENS
        assert plan.filler_tokens < MIN_PASS_TOKENS
        for request, tokens in plan.tokens.items():
            admission.ran(request, tokens)
        passes.append(plan.tokens)
        assert len(passes) <= sum(lengths), "no progress"
    return passes


@given(st.lists(st.integers(1, 300), max_size=40))
def test_splits_depend_on_the_row_alone_and_limits_hold(lengths):
    passes = run_all(lengths)
    parts = {request: [] for request in range(len(lengths))}
    for tokens in passes:
        assert sum(tokens.values()) <= SPLIT
        assert len(tokens) <= REQUESTS
        for request, count in tokens.items():
            parts[request].append(count)
    for request, length in enumerate(lengths):
        whole, rest = divmod(length, SPLIT)
        assert parts[request] == [SPLIT] * whole + [rest] * (rest > 0)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_the_head_of_the_queue_enters_with_the_next_free_pass(lengths):
    """A prompt waits no longer than the passes of those before it, and one of those overtaking."""
    passes = run_all(lengths)
    first = {}
    for number, tokens in enumerate(passes):
        for request in tokens:
            first.setdefault(request, number)
    for request in range(len(lengths)):
        before = sum(-(-length // SPLIT) for length in lengths[:request])
        assert first[request] <= before + 1


@given(st.lists(st.integers(1, 300), min_size=2, max_size=20), st.data())
def test_dropped_requests_are_never_run_again(lengths, data):
    limits = Limits(SPLIT, REQUESTS, BLOCKS, lambda tokens: -(-tokens // BLOCK))
    admission = Admission(limits)
    for request, length in enumerate(lengths):
        admission.add(request, length)
    plan = admission.next_pass()
    for request, tokens in plan.tokens.items():
        admission.ran(request, tokens)
    dropped = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    admission.drop(dropped)
    while len(admission):
        plan = admission.next_pass()
        assert not dropped & plan.tokens.keys()
        for request, tokens in plan.tokens.items():
            admission.ran(request, tokens)

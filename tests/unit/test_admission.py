"""Admission: whole prompts, fixed splits, nobody starved."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wllm_ray.capture.admission import MIN_PASS_TOKENS, Admission, Limits

pytestmark = pytest.mark.requirement("D-3")

SPLIT, REQUESTS, BLOCK, BLOCKS = 64, 5, 16, 24


LIMITS = Limits(SPLIT, SPLIT, REQUESTS, BLOCKS, lambda tokens: -(-tokens // BLOCK))


def filled(lengths, limits=LIMITS):
    admission = Admission(limits)
    for request, length in enumerate(lengths):
        admission.add(request, length)
    return admission


def run(admission, plan, lengths):
    """What an engine does that runs the pass as planned."""
    for request, tokens in plan.tokens.items():
        end = admission.start_of(request) + tokens
        admission.ran(request, end)
        if end == lengths[request]:
            admission.end(request)


def run_all(lengths, limits=LIMITS):
    """Run every prompt; returns the passes as {request: tokens}."""
    admission = filled(lengths, limits)
    passes = []
    while len(admission):
        plan = admission.next_pass()
        assert sum(plan.tokens.values()) + plan.filler_tokens >= MIN_PASS_TOKENS
        assert plan.filler_tokens < MIN_PASS_TOKENS
        run(admission, plan, lengths)
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
    admission = filled(lengths)
    run(admission, admission.next_pass(), lengths)
    dropped = data.draw(st.sets(st.integers(0, len(lengths) - 1)))
    admission.drop(dropped)
    while len(admission):
        plan = admission.next_pass()
        assert not dropped & plan.tokens.keys()
        run(admission, plan, lengths)


@given(st.lists(st.integers(1, 300), max_size=40))
def test_where_prompts_cannot_be_split_long_ones_run_whole_and_alone(lengths):
    whole = dataclasses.replace(LIMITS, split_tokens=300)
    for tokens in run_all(lengths, whole):
        assert sum(tokens.values()) <= SPLIT or len(tokens) == 1
        assert all(count == lengths[request] for request, count in tokens.items())


@pytest.mark.requirement("C-2")
def test_a_request_that_starts_again_is_planned_from_where_it_stands():
    admission = filled([SPLIT + 20])
    assert admission.next_pass().tokens == {0: SPLIT}
    admission.ran(0, SPLIT)
    assert admission.next_pass().tokens == {0: 20}
    admission.ran(0, 30)  # pre-empted, and run again as far as position 30
    assert admission.start_of(0) == 30
    assert admission.next_pass().tokens == {0: SPLIT + 20 - 30}


@pytest.mark.requirement("R-5")
def test_a_request_that_ran_whole_and_did_not_end_is_waited_for_without_fillers():
    """A filler would keep the engine stepping for ever; without one it says that nothing ran."""
    admission = filled([20])
    admission.next_pass()
    admission.ran(0, 20)
    plan = admission.next_pass()
    assert (plan.tokens, plan.filler_tokens) == ({0: 0}, 0)
    assert len(admission) == 1
    admission.end(0)
    assert len(admission) == 0

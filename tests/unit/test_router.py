"""The router against a simulated scheduler: every wanted position once, from the right flat row."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wllm_ray.capture.router import Pass, Router

pytestmark = pytest.mark.requirement("C-2", "C-3")


def make_pass(spans, prompts, corrupt=None):
    """A pass from (request id, start, count); the value of a flat row is (request, position)."""
    ids, truth = [], []
    for request_id, start, count in spans:
        for position in range(start, start + count):
            prompt = prompts[request_id]
            ids.append(int(prompt[position]) if position < len(prompt) else 7)
            truth.append((request_id, position))
    if corrupt is not None:
        ids[corrupt] += 1
    counts = np.array([count for *_, count in spans], dtype=np.int64)
    one = Pass(
        request_ids=tuple(request_id for request_id, *_ in spans),
        query_start_loc=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        num_computed=np.array([start for _, start, _ in spans], dtype=np.int64),
        num_scheduled=counts,
        token_ids=np.array(ids, dtype=np.int64),
    )
    return one, truth


@st.composite
def schedules(draw):
    """Random prompts, wanted positions, and passes with chunks, decodes, restarts, other orders."""
    random = draw(st.randoms(use_true_random=False))
    prompts = {
        f"r{i}": np.array([random.randrange(1000) for _ in range(random.randint(1, 40))])
        for i in range(random.randint(1, 6))
    }
    wanted = {
        request_id: np.array(
            sorted(random.sample(range(len(prompt)), random.randint(1, len(prompt))))
        )
        for request_id, prompt in prompts.items()
        if random.random() < 0.8
    }
    done = dict.fromkeys(prompts, 0)
    passes = []
    while any(done[r] < len(prompts[r]) for r in prompts):
        chosen = [r for r in prompts if random.random() < 0.7]
        random.shuffle(chosen)
        spans = []
        for request_id in chosen:
            if done[request_id] and random.random() < 0.1:
                done[request_id] = 0  # pre-empted: recomputed from the start
            left = len(prompts[request_id]) - done[request_id]
            count = random.randint(1, max(1, left)) if left > 0 else 1  # else one decoded token
            spans.append((request_id, done[request_id], count))
            done[request_id] += count
        if spans:
            passes.append(spans)
    return prompts, wanted, passes


@settings(max_examples=200)
@given(schedules())
def test_each_wanted_position_comes_once_from_its_own_row(schedule):
    prompts, wanted, passes = schedule
    router = Router()
    for request_id, positions in wanted.items():
        router.reserve(request_id, prompts[request_id], positions)
    got, again, seen = {}, 0, []
    for spans in passes:
        one, truth = make_pass(spans, prompts)
        seen += truth
        routed = router.route(one)
        assert not routed.mismatched
        again += sum(routed.recaptured.values())
        for route in routed.routes:
            for row, slot in zip(route.rows, route.slots, strict=True):
                key = (route.request_id, int(slot))
                assert key not in got
                got[key] = truth[row]
    expected = {
        (request_id, slot): (request_id, int(position))
        for request_id, positions in wanted.items()
        for slot, position in enumerate(positions)
    }
    assert got == expected
    ran = sum((r, p) in set(expected.values()) for r, p in seen)
    assert again == ran - len(expected)


@settings(max_examples=50)
@given(schedules(), st.data())
def test_another_token_id_anywhere_in_a_prompt_is_noticed(schedule, data):
    prompts, wanted, passes = schedule
    router = Router()
    for request_id, positions in wanted.items():
        router.reserve(request_id, prompts[request_id], positions)
    spans = data.draw(st.sampled_from(passes))
    _, truth = make_pass(spans, prompts)
    at = data.draw(st.integers(0, len(truth) - 1))
    one, _ = make_pass(spans, prompts, corrupt=at)
    request_id, position = truth[at]
    routed = router.route(one)
    in_prompt = request_id in wanted and position < len(prompts[request_id])
    assert list(routed.mismatched) == ([request_id] if in_prompt else [])
    assert all(route.request_id != request_id for route in routed.routes) or not in_prompt


def test_a_mismatch_names_the_position_and_both_ids():
    router = Router()
    router.reserve("a", np.array([5, 6, 7]), np.array([2]))
    one, _ = make_pass([("a", 0, 3)], {"a": np.array([5, 9, 7])})
    assert router.route(one).mismatched == {
        "a": "position 1: token id 6 was submitted, the engine ran 9"
    }


def test_requests_without_a_reservation_are_never_captured():
    router = Router()
    one, _ = make_pass([("_warmup_0", 0, 4)], {"_warmup_0": np.arange(4)})
    assert router.route(one).routes == ()
    router.reserve("a", np.arange(4), np.array([3]))
    router.release("a")
    one, _ = make_pass([("a", 0, 4)], {"a": np.arange(4)})
    assert router.route(one).routes == ()
    assert len(router) == 0


@pytest.mark.parametrize("positions", [[], [-1], [2, 1], [1, 1]])
def test_positions_must_ascend_from_zero(positions):
    with pytest.raises(ValueError, match="positions must ascend"):
        Router().reserve("a", np.arange(4), np.array(positions, dtype=np.int64))


def test_an_id_is_reserved_once():
    router = Router()
    router.reserve("a", np.arange(4), np.array([3]))
    with pytest.raises(ValueError, match="reserved already"):
        router.reserve("a", np.arange(4), np.array([3]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"request_ids": ("a", "a")}, "occurs twice"),
        ({"query_start_loc": np.array([0, 5])}, "expected 3 offsets"),
        ({"query_start_loc": np.array([0, 3, 5])}, "do not match the scheduled"),
        ({"token_ids": np.arange(4)}, "expected 5 token ids"),
    ],
)
def test_a_pass_that_contradicts_itself_is_refused(change, message):
    parts = {
        "request_ids": ("a", "b"),
        "query_start_loc": np.array([0, 2, 5]),
        "num_computed": np.array([0, 0]),
        "num_scheduled": np.array([2, 3]),
        "token_ids": np.arange(5),
    }
    with pytest.raises(ValueError, match=message):
        Pass(**parts | change)

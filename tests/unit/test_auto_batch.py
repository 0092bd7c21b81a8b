"""How rows are cut into calls: within a budget, in order, and from what an engine really takes."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import FakeEngine, fake_description
from wllm_ray.engines.auto_batch import AutoBatch, MemoryProfile, RowsPerCall, batching_of
from wllm_ray.errors import InvalidInputError
from wllm_ray.records import InputRow
from wllm_ray.requests import select
from wllm_ray.tokens import make_records

MIB = 1024 * 1024


def selection_of(position="last_prompt", layers=(0, 1)):
    return select(
        fake_description(), layers=list(layers), site="block", sites=None, position=position
    )


def records_of(lengths, selection):
    rows = [InputRow(f"r{n}", {"token_ids": [1] * size}) for n, size in enumerate(lengths)]
    records = make_records(rows, selection.identity)
    return [
        record._replace(token_ids=np.ones(size, np.int32))
        for record, size in zip(records, lengths, strict=True)
    ]


profiles = st.builds(
    MemoryProfile,
    call_bytes=st.integers(0, 5000),
    token_bytes=st.floats(0, 100),
    pass_tokens=st.integers(8, 200),
    feature_copies=st.integers(1, 3),
)


@pytest.mark.requirement("C-15")
@given(
    profile=profiles,
    budget=st.integers(1, 200_000),
    max_rows=st.integers(1, 20),
    max_tokens=st.integers(1, 500),
    calls=st.integers(1, 4),
    lengths=st.lists(st.integers(1, 64), max_size=60),
    position=st.sampled_from(["last_prompt", "all_prompt", "index:0,-1"]),
)
def test_a_call_is_within_every_bound_and_as_large_as_they_allow(  # noqa: PLR0917
    profile, budget, max_rows, max_tokens, calls, lengths, position
):
    selection = selection_of(position)
    rows = records_of(lengths, selection)
    row_bytes = 4 * sum(selection.site_widths)

    def fits(part):
        tokens = sum(len(row.token_ids) for row in part)
        features = row_bytes * sum(selection.feature_rows(row) for row in part)
        taken = profile.bytes_of(tokens, features)
        return taken * calls <= budget and len(part) <= max_rows and tokens <= max_tokens

    batch = AutoBatch(profile, budget, max_rows, max_tokens)
    parts = list(batch.plan(rows, selection, calls))
    assert [row for part in parts for row in part] == rows
    for number, part in enumerate(parts):
        assert len(part) == 1 or fits(part)
        if number + 1 < len(parts):
            assert not fits([*part, parts[number + 1][0]]), "one more row would have fitted"


@pytest.mark.requirement("C-15")
def test_the_features_of_ragged_rows_count_and_those_of_one_row_positions_hardly_do():
    profile = MemoryProfile(call_bytes=0, token_bytes=0, pass_tokens=64)
    batch = AutoBatch(profile, budget_bytes=2 * 40 * 64)
    for position, rows_per_call in (("last_prompt", 40), ("all_prompt", 4)):
        selection = selection_of(position)  # two sites of 8 float32: 64 bytes a feature row
        parts = list(batch.plan(records_of([10] * 80, selection), selection))
        assert {len(part) for part in parts} == {rows_per_call}


@pytest.mark.requirement("C-15")
def test_tokens_beyond_one_forward_pass_cost_nothing_more():
    profile = MemoryProfile(call_bytes=100, token_bytes=10.0, pass_tokens=50)
    assert profile.bytes_of(20, 0) == 300
    assert profile.bytes_of(50, 0) == profile.bytes_of(5000, 0) == 600
    assert profile.bytes_of(5000, 7) == 614


class Hungry(FakeEngine):
    """Takes memory as an engine does: some for each call, more for each token of a pass."""

    CALL, TOKEN = 20 * MIB, 150_000

    def capture(self, task):
        tokens = sum(len(row.token_ids) for row in task.rows)
        taken = np.ones(self.CALL + self.TOKEN * tokens, np.uint8)
        time.sleep(0.05)
        chunk = super().capture(task)
        del taken
        return chunk


@pytest.mark.requirement("C-15")
def test_a_measured_profile_foretells_what_a_larger_call_takes():
    engine = Hungry(fake_description(fingerprint=_fingerprint(prefill_split_tokens=4096)))
    batch = AutoBatch.measure(engine, budget_bytes=500 * MIB, row_tokens=64, rows=(2, 16))
    truth = Hungry.CALL + Hungry.TOKEN * 3000
    foretold = batch.profile.bytes_of(3000, 0)
    assert truth <= foretold <= 1.5 * truth
    selection = selection_of()
    parts = list(batch.plan(records_of([64] * 200, selection), selection))
    tokens = max(sum(len(row.token_ids) for row in part) for part in parts)
    assert 0.6 * 500 * MIB < Hungry.CALL + Hungry.TOKEN * tokens <= 500 * MIB


@pytest.mark.requirement("C-15")
def test_an_engine_that_reserved_its_memory_at_the_start_is_bounded_by_features_alone():
    batch = AutoBatch.measure(FakeEngine(), budget_bytes=100 * MIB, row_tokens=8)
    assert batch.profile.bytes_of(10**6, 0) < 50 * MIB


def _fingerprint(**changes):
    return fake_description().fingerprint.model_copy(update=changes)


@pytest.mark.requirement("C-15")
def test_without_a_budget_a_share_of_the_available_memory_is_taken(monkeypatch):
    monkeypatch.setattr("wllm_ray.engines.auto_batch.available_memory", lambda: 8 * MIB)
    assert AutoBatch.estimated(fake_description()).budget_bytes == 2 * MIB
    monkeypatch.setattr("wllm_ray.engines.auto_batch.available_memory", lambda: None)
    assert AutoBatch.estimated(fake_description()).budget_bytes == 512 * MIB


@pytest.mark.requirement("C-15")
def test_what_cannot_be_a_plan_is_refused():
    with pytest.raises(InvalidInputError, match="a number of bytes from 1"):
        AutoBatch.estimated(fake_description(), budget_bytes=0)
    with pytest.raises(InvalidInputError, match="two growing numbers"):
        AutoBatch.measure(FakeEngine(), rows=(4, 4))
    own = AutoBatch.estimated(fake_description())
    assert batching_of(own, fake_description()) is own
    assert batching_of(7, fake_description()) == RowsPerCall(7)

"""Router, hooks, buffers and depth together, on random histories of a scheduler.

After every history each wanted (row, site, position) is exactly what the model gives for that row
alone, or the row has failed for a reason that the history holds; nothing of another row, ever.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_models import HIDDEN, LAYERS, contexts_of
from toy_scheduler import (
    ALL_SITES,
    DEPTHS,
    MODEL,
    READINGS_OF_MODEL,
    History,
    check,
    check_many,
)

from wllm_ray.capture import coverage, hooks, router
from wllm_ray.capture.coverage import ChunkCapture, RowsWanted, SitesWanted
from wllm_ray.capture.depth import DepthBound
from wllm_ray.capture.hooks import SiteHooks
from wllm_ray.capture.passes import PassCapture
from wllm_ray.capture.router import Pass
from wllm_ray.capture.staging import HostStager

pytestmark = pytest.mark.requirement("C-2", "C-3")

CODES = (None, "position_missing", "token_mismatch")


@settings(max_examples=150)
@given(st.integers(0, 2**32))
def test_each_row_is_its_own_or_has_failed(seed):
    check(History(seed))


def test_the_histories_hold_what_they_are_for():
    """Else the property above would say little."""
    seen = Counter()
    for seed in range(60):
        history = History(seed)
        seen["passes cut short"] += history.cut
        for chunk in history.chunks:
            chunk.capture.prove()
            seen["aborted"] += chunk.aborted
            seen["run again"] += chunk.capture.recaptured
            seen["decoded"] += sum(one.reached > len(one.prompt) for one in chunk.requests)
            seen.update(row.failure and row.failure.code for row in chunk.capture.rows)
    assert set(seen) == {"passes cut short", "aborted", "run again", "decoded", *CODES}
    assert min(seen.values()) >= 5, seen


def test_the_readings_are_all_there():
    kinds = {site.kind for site in ALL_SITES}
    assert kinds == {
        "embed",
        "resid_pre",
        "attn_out",
        "attn_out_prelinear",
        "resid_mid",
        "mlp_out",
        "resid_post",
        "final_norm",
    }
    assert len(ALL_SITES) == 2 + 6 * LAYERS


def _off_by_one(monkeypatch):
    route_one = router._route_one

    def shifted(one_pass, place, reservation):
        route, again = route_one(one_pass, place, reservation)
        rows = (route.rows + 1) % one_pass.query_start_loc[-1]
        return router.Route(route.request_id, rows, route.slots), again

    monkeypatch.setattr(router, "_route_one", shifted)


def _prompt_length_for_computed(monkeypatch):
    """The start of a span forgotten: right as long as no prompt is split."""
    route_one = router._route_one

    def from_zero(one_pass, place, reservation):
        starts = one_pass.num_computed.copy()
        starts[place] = 0
        parts = (one_pass.request_ids, one_pass.query_start_loc, starts, one_pass.num_scheduled)
        return route_one(Pass(*parts, one_pass.token_ids), place, reservation)

    monkeypatch.setattr(router, "_route_one", from_zero)


def _appended_again(monkeypatch):
    """What is run again after pre-emption is written again."""
    route_one = router._route_one

    def forgetful(one_pass, place, reservation):
        reservation.taken[:] = False
        return route_one(one_pass, place, reservation)

    monkeypatch.setattr(router, "_route_one", forgetful)


def _order_of_the_pass_before(monkeypatch):
    """Chunks share a gather; their rows are handed out in another order."""
    settle_site = hooks._settle

    def reversed_(site, work):
        work.gathers.reverse()
        settle_site(site, work)

    monkeypatch.setattr(hooks, "_settle", reversed_)


def _not_copied(monkeypatch):
    """A view of what the module returned, which the next fused norm writes into."""

    def view(value, path, rows):
        tensor = hooks.take.__globals__["follow"](value, path)
        return tensor[int(rows[0]) : int(rows[0]) + 1] if len(rows) == 1 else tensor[rows]

    monkeypatch.setattr(hooks, "take", view)


def _columns_swapped(monkeypatch):
    """Two sites of one chunk, each in the other's columns."""
    init = coverage.ChunkCapture.__init__

    def swapped(self, *args, **kwargs):
        init(self, *args, **kwargs)
        if len(self.sites) > 1 and len(set(self.wanted.widths[:2])) == 1:
            one, other = self.sites[:2]
            self.columns[one], self.columns[other] = self.columns[other], self.columns[one]

    monkeypatch.setattr(coverage.ChunkCapture, "__init__", swapped)


def _too_shallow(monkeypatch):
    """Passes stop where the shallowest row is content."""
    begin = DepthBound.begin
    monkeypatch.setattr(
        DepthBound, "begin", lambda self, deepest: begin(self, deepest and max(-1, deepest - 1))
    )


@pytest.mark.parametrize(
    "fault",
    [
        _off_by_one,
        _prompt_length_for_computed,
        _appended_again,
        _order_of_the_pass_before,
        _not_copied,
        _columns_swapped,
        _too_shallow,
    ],
)
def test_the_property_fails_where_there_is_a_fault(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        check_many(range(60))


def a_capture(*, decodes=False):
    """One row of four tokens that is read at block 0, and the pass that runs it whole."""
    site = next(site for site in ALL_SITES if str(site) == "L0_resid_post")
    prompt = np.arange(4, dtype=np.int32)
    chunk = ChunkCapture(
        SitesWanted((site,), (HIDDEN,), 0), [RowsWanted(0, prompt, np.arange(4))], ["r"]
    )
    capture = PassCapture(SiteHooks(READINGS_OF_MODEL, HostStager()), DEPTHS)
    capture.depth_bounded = True
    capture.reserve(chunk.rows[0])
    if not decodes:
        capture.expect("r", 0)
    ids = np.arange(4)
    return capture, chunk, Pass(("r",), np.array([0, 4]), np.array([0]), np.array([4]), ids)


@pytest.mark.requirement("C-6")
@pytest.mark.parametrize("decodes", [False, True])
def test_head_and_sampler_are_left_out_where_nobody_wants_a_token(decodes):
    capture, _, one_pass = a_capture(decodes=decodes)
    capture.begin(one_pass)
    assert capture.headless is not decodes
    with torch.inference_mode():
        MODEL(torch.arange(4), contexts_of(range(4)))
    capture.end()
    # The head of a pass runs after its blocks.
    assert capture.headless is not decodes
    assert capture.ran == {"r": (0, 4)}


@pytest.mark.requirement("C-6")
def test_a_pass_that_cannot_be_read_is_not_cut_like_the_one_before(monkeypatch):
    """Who generates in it would be given tokens that the model never chose."""
    capture, chunk, one_pass = a_capture()
    capture.begin(one_pass)
    capture.end()
    assert capture.headless
    monkeypatch.setattr(capture.hooks, "begin", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        capture.begin(one_pass)
    assert not capture.headless
    with torch.inference_mode():
        output = MODEL(torch.arange(4), contexts_of(range(4)))
    capture.end()
    assert output.shape == (4, HIDDEN)
    chunk.prove()
    assert chunk.rows[0].failure.code == "hook_failed"


def test_rows_in_flight_are_failed_together():
    capture, chunk, _ = a_capture()
    capture.fail_all("a pass was not read")
    assert chunk.rows[0].failure.message == "a pass was not read"
    capture.release("r")
    assert len(capture.router) == 0

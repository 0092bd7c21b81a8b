"""Hooks are on the model while they are needed, read each place once a pass, and never raise."""

import logging

import numpy as np
import pytest
import torch
from torch import nn

from wllm_ray.capture.coverage import ChunkCapture, RowsWanted, SitesWanted
from wllm_ray.capture.hooks import Gather, SiteHooks
from wllm_ray.capture.reading import Part, Place, Reading, Side
from wllm_ray.capture.staging import HostStager
from wllm_ray.sites import HookSite

pytestmark = pytest.mark.requirement("C-4", "C-3")

ONE, TWO, SUM = HookSite(0, "resid_pre"), HookSite(1, "resid_post"), HookSite(1, "mlp_out")


class Add(nn.Module):
    def forward(self, value, *, more=None):
        return value + 1 if more is None else value + more


class Counting(HostStager):
    """Notes how often the host is asked for anything."""

    def __init__(self):
        self.indices, self.staged = 0, []

    def index(self, rows):
        self.indices += 1
        return super().index(rows)

    def stage(self, key, rows):
        self.staged.append((str(key), rows.shape[0]))
        return super().stage(key, rows)


class Setup:
    """Two modules, three sites: an input, an output, and the sum of both times a constant."""

    def __init__(self):
        self.first, self.second = Add(), Add()
        given = Part(Place(self.first, "first", Side.INPUT), (1, "more"))
        returned = Part(Place(self.second, "second", Side.OUTPUT), ())
        self.stager = Counting()
        self.hooks = SiteHooks(
            {
                ONE: Reading((given,), 2, 0),
                TWO: Reading((returned,), 2, 1),
                SUM: Reading((given, returned), 2, 1, scale=0.5),
            },
            self.stager,
        )

    def chunk(self, *sites, rows=(2, 1)):
        """A chunk of rows with so many positions each."""
        wanted = [
            RowsWanted(i, np.arange(count, dtype=np.int32), np.arange(count))
            for i, count in enumerate(rows)
        ]
        widths = (2,) * len(sites)
        return ChunkCapture(
            SitesWanted(sites, widths, 1), wanted, [f"r{i}" for i in range(len(rows))]
        )

    def run(self, *gathers, times=1):
        """One pass of 4 flat rows: the input is 10 a row, what the second returns 100 a row."""
        self.hooks.begin(gathers)
        given = torch.arange(4.0)[:, None].expand(4, 2)
        for _ in range(times):
            self.first(given * 0, more=given * 10)
            self.second(given * 100 - 1)
        self.hooks.end()

    def fires(self):
        return [
            len(m._forward_hooks) + len(m._forward_pre_hooks) for m in (self.first, self.second)
        ]


@pytest.fixture
def setup():
    return Setup()


def gather(chunk, rows, slots=None):
    slots = range(len(rows)) if slots is None else slots
    return Gather(chunk, np.array(rows), np.array(list(slots)), tuple(chunk.rows))


def codes(chunk):
    chunk.prove()
    return [row.failure and row.failure.code for row in chunk.rows]


def test_each_site_is_read_where_its_reading_says(setup):
    chunk = setup.chunk(SUM, ONE, TWO)
    setup.run(gather(chunk, [3, 1, 2], slots=[2, 0, 1]))
    assert codes(chunk) == [None, None]
    assert chunk.features[:, ::2].tolist() == [[55, 10, 100], [110, 20, 200], [165, 30, 300]]


def test_chunks_share_one_copy_for_each_site(setup):
    one, other = setup.chunk(TWO, rows=(1, 1)), setup.chunk(TWO, ONE, rows=(1,))
    setup.run(gather(one, [1, 3]), gather(other, [2]))
    assert setup.stager.staged == [(str(ONE), 1), (str(TWO), 3)]
    # One index for the rows of both, one for the other's own.
    assert setup.stager.indices == 2
    assert one.features.tolist() == [[100, 100], [300, 300]]
    assert other.features.tolist() == [[200, 200, 20, 20]]


def test_only_places_that_are_read_have_hooks(setup):
    assert setup.fires() == [0, 0]
    for sites, expected in (((TWO,), [0, 1]), ((SUM,), [1, 1]), ((ONE,), [1, 0]), ((), [0, 0])):
        chunks = [setup.chunk(*sites)] if sites else []
        setup.run(*(gather(chunk, [1, 2, 3]) for chunk in chunks))
        assert setup.fires() == expected
    setup.run(gather(setup.chunk(SUM), [1, 2, 3]))
    setup.hooks.remove()
    assert setup.fires() == [0, 0]


def test_hooks_stay_on_while_the_same_is_read(setup, monkeypatch):
    added = []
    monkeypatch.setattr(
        SiteHooks,
        "_hook",
        lambda self, place, hook=SiteHooks._hook: added.append(place) or hook(self, place),
    )
    for _ in range(3):
        setup.run(gather(setup.chunk(TWO), [1, 2, 3]))
    assert len(added) == 1


@pytest.mark.parametrize(
    ("times", "often"), [(0, "never, or not everywhere"), (2, "more than once")]
)
def test_a_hook_that_did_not_fire_once_fails_its_rows(times, often, setup):
    chunk, other = setup.chunk(TWO), setup.chunk(ONE)
    setup.run(gather(chunk, [1, 2, 3]), gather(other, [1, 2, 3]), times=times)
    assert codes(chunk) == ["hook_failed"] * 2
    assert chunk.rows[0].failure.message == f"the hook of L1_resid_post fired {often} in one pass"
    assert not chunk.rows[0].failure.permanent


def test_a_part_that_was_not_reached_fails_the_site(setup):
    chunk = setup.chunk(SUM)
    setup.hooks.begin([gather(chunk, [0, 1, 2])])
    setup.second(torch.ones(4, 2))
    setup.hooks.end()
    assert codes(chunk) == ["hook_failed"] * 2


def test_what_a_hook_raises_is_recorded_and_held(setup, caplog):
    """No module fails for it, and other chunks of the pass are none the worse."""
    chunk, other = setup.chunk(ONE), setup.chunk(TWO)
    setup.hooks.begin([gather(chunk, [1, 2, 3]), gather(other, [1, 2, 3])])
    with caplog.at_level(logging.ERROR):
        setup.first(torch.zeros(4, 2), more=torch.zeros(4, 2, dtype=torch.int64))
        setup.second(torch.ones(4, 2))
        setup.hooks.end()
    assert codes(chunk) == ["hook_failed"] * 2
    assert chunk.rows[1].failure.message == (
        "the hook of L0_resid_pre raised TypeError; the log has more"
    )
    assert "expected a floating-point tensor" in caplog.text
    assert codes(other) == [None, None]


def test_rows_outside_the_pass_are_held_as_well(setup):
    chunk = setup.chunk(TWO)
    setup.run(gather(chunk, [1, 2, 9]))
    assert codes(chunk) == ["hook_failed"] * 2


def test_nothing_is_taken_between_passes(setup):
    """Warm-up and profiling passes come without an announcement."""
    chunk = setup.chunk(TWO)
    setup.run(gather(chunk, [1, 2, 3]))
    before = chunk.features.copy()
    setup.first(torch.zeros(4, 2), more=torch.zeros(4, 2))
    setup.second(torch.zeros(4, 2))
    setup.hooks.end()
    assert codes(chunk) == [None, None]
    assert np.array_equal(chunk.features, before)
    assert len(setup.stager.staged) == 1

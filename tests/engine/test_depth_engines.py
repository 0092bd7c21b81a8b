"""Engines of their own that stop early, that must not, and that cannot."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from both_ways import PROMPTS, every_site_both_ways
from conftest import relative_l2, stacked, task_of
from tiny_models import LAYERS

from wllm_ray.capture import hooks
from wllm_ray.capture.depth import DepthBound

pytestmark = pytest.mark.requirement("C-6")

HERE = Path(__file__).parent
ALL_BLOCKS = list(range(LAYERS))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family",
    [
        "gemma3",
        "gemma4",
        "granite",
        "falcon",
        "gpt2",
        "mixtral",
        "cohere",
        "opt_350m",
        "bloom",
    ],
)
def test_every_site_of_other_structures(family, dtype, open_engine):
    with open_engine(family, dtype=dtype) as other:
        assert other.description.depth_bounded
        assert every_site_both_ways(other) == []


@pytest.mark.parametrize("family", ["falcon_h1"])
def test_a_recurrent_state_survives_cut_passes(family, open_engine, reference):
    """A cut pass leaves the state of the blocks above untouched, and later rows alone."""
    with open_engine(family) as hybrid:
        assert hybrid.description.depth_bounded
        for _ in range(2):
            hybrid.capture(task_of(PROMPTS, (0,)))
            chunk = hybrid.capture(task_of(PROMPTS))
            assert relative_l2(stacked(chunk), reference(family).all_rows(PROMPTS)).max() <= 1e-4


def test_where_it_is_not_wanted_every_pass_is_whole(open_engine):
    with open_engine("qwen3", depth_bounded=False) as whole:
        assert not whole.description.depth_bounded
        assert "as was asked" in whole.description.selftest.checks["depth"]
        whole.capture(task_of([PROMPTS[1]], (0,)))
        assert whole._loop.driver.capture.bound.ran == ALL_BLOCKS


@pytest.fixture
def uncuttable(monkeypatch):
    """Blocks that hold every exception and go on: nothing leaves such a model early."""
    from torch import nn
    from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer

    def hold(self, *args, **kwargs):
        try:
            return nn.Module.__call__(self, *args, **kwargs)
        except BaseException:  # noqa: BLE001 (the fault)
            return self.forward(*args, **kwargs)

    monkeypatch.setattr(Qwen3DecoderLayer, "__call__", hold)


@pytest.mark.requirement("C-11")
@pytest.mark.usefixtures("uncuttable")
def test_a_model_that_cannot_be_cut_runs_whole_and_says_so(open_engine, reference):
    with open_engine("qwen3") as started:
        told = started.description
        assert not told.depth_bounded
        assert "this model cannot be cut" in told.selftest.checks["depth"]
        chunk = started.capture(task_of(PROMPTS))
        assert chunk.failures == {}
        assert relative_l2(stacked(chunk), reference("qwen3").all_rows(PROMPTS)).max() <= 1e-4
        started.capture(task_of([PROMPTS[1]], (0,)))
        assert started._loop.driver.capture.bound.ran == ALL_BLOCKS


@pytest.mark.requirement("C-3")
@pytest.mark.usefixtures("uncuttable")
def test_a_block_that_ran_though_it_should_not_fails_the_rows(open_engine):
    with open_engine("qwen3", selftest=False) as started:
        chunk = started.capture(task_of([PROMPTS[1]], (1,)))
    assert chunk.failures[0].code == "hook_failed"
    assert "blocks 0 to 1 should have run once each" in chunk.failures[0].message


@pytest.mark.requirement("C-11")
def test_a_cut_that_changes_bits_is_given_up(open_engine, monkeypatch):
    """Planted: in cut passes the rows that are read are a little off."""
    begin, take, cut = DepthBound.begin, hooks.take, []

    def note(self, deepest):
        cut[:] = [1] if deepest is not None else []
        begin(self, deepest)

    monkeypatch.setattr(DepthBound, "begin", note)
    monkeypatch.setattr(hooks, "take", lambda *given: take(*given) * (1 + 1e-6 * len(cut)))
    with open_engine("qwen3") as started:
        assert not started.description.depth_bounded
        assert "the rows differ" in started.description.selftest.checks["depth"]


@pytest.mark.slow
@pytest.mark.requirement("C-12")
def test_the_second_runner_stops_as_early(tiny_model, tmp_path):
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, HERE / "v2_depth.py", tiny_model("qwen3")],
        cwd=HERE.parents[1],
        env=os.environ | {"PYTHONPATH": str(HERE.parents[1]), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["ran"] == {"embed": [], "L0_attn_out": [0], "L2_resid_post": [0, 1, 2]}
    assert told["differ"] == []
    assert told["tokens beside captures"] == told["tokens alone"]
    assert [len(ids) for ids in told["tokens alone"]] == [4, 4]

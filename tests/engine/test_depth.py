"""Passes stop at the deepest block that is read in them, and change no bit by it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from conftest import SPLIT, idle, prompts_of, relative_l2, stacked, task_of
from tiny_models import LAYERS

from wllm_ray.capture.depth import DepthBound
from wllm_ray.offered import offered_sites

pytestmark = pytest.mark.requirement("C-6")

HERE = Path(__file__).parent
PROMPTS = prompts_of([1, 9, SPLIT, SPLIT + 1, 2 * SPLIT + 1, 30], seed=51)
ALL_BLOCKS = list(range(LAYERS))


class Counters:
    """Hooks of the test's own on what should not run, pass by pass."""

    def __init__(self, engine):
        self.passes = []
        self.runner = engine._loop.driver._core.model_executor.driver_worker.worker.model_runner
        inner = self.runner.model.model
        self._now = None
        self.handles = [
            block.register_forward_pre_hook(lambda *_, layer=layer: self._now.append(layer))
            for layer, block in enumerate(inner.layers)
        ]
        parts = {
            "norm": inner.norm,
            "head": self.runner.model.logits_processor,
            "sampler": self.runner.sampler,
        }
        self.handles += [
            part.register_forward_pre_hook(lambda *_, name=name: self._now.append(name))
            for name, part in parts.items()
        ]

    def begin(self):
        self._now = []
        self.passes.append(self._now)


@pytest.fixture
def count(engine, monkeypatch):
    """What ran in each pass since: a list of block numbers, ``norm``, ``head``, ``sampler``."""
    counters, capture = Counters(engine), engine._loop.driver.capture
    begin = capture.begin

    def note(one_pass):
        counters.begin()
        begin(one_pass)

    monkeypatch.setattr(capture, "begin", note)
    yield counters
    for handle in counters.handles:
        handle.remove()


def bounded(engine, whether):
    """Let passes stop early or not."""
    capture = engine._loop.driver.capture
    engine._loop.call(lambda: setattr(capture, "depth_bounded", whether))


def in_one_pass(engine, *tasks):
    """Capture chunks that enter the engine between the same two passes."""
    jobs = engine._loop.call(lambda: [engine._submit(task)[0] for task in tasks])
    return [engine._result(task, job.done.result(60) and job, {}) for task, job in zip(tasks, jobs, strict=True)]


@pytest.mark.parametrize(
    ("site", "blocks"),
    [
        ("embed", 0),
        ("L0_resid_pre", 0),
        ("L0_attn_out", 1),
        ("L0_resid_post", 1),
        ("L1_resid_pre", 1),
        ("L2_resid_mid", 3),
        ("L3_resid_post", 4),
    ],
)
def test_what_lies_above_does_not_run(site, blocks, engine, count):
    chunk = engine.capture(task_of([PROMPTS[1], PROMPTS[4]], sites=[site], position="all_prompt"))
    assert chunk.failures == {}
    assert len(count.passes) >= 3
    assert all(ran == ALL_BLOCKS[:blocks] for ran in count.passes)


def test_the_last_norm_runs_where_it_is_read_and_the_head_does_not(engine, count):
    engine.capture(task_of([PROMPTS[1]], sites=["final_norm", "L0_attn_out"]))
    assert count.passes == [[*ALL_BLOCKS, "norm"]]


def every_site_both_ways(engine):
    """Sites whose bits differ between passes that stop and passes that do not."""
    sites = offered_sites(engine.description)
    tasks = [task_of(PROMPTS, sites=[str(one)], position="all_prompt") for one in sites]
    cut = [engine.capture(task).features for task in tasks]
    bounded(engine, whether=False)
    whole = [engine.capture(task).features for task in tasks]
    bounded(engine, whether=True)
    assert len(sites) > 2 * LAYERS
    pairs = zip(sites, cut, whole, strict=True)
    return [str(site) for site, one, other in pairs if not np.array_equal(one, other)]


def test_every_site_has_the_bits_of_the_whole_forward(engine):
    assert engine.description.depth_bounded
    assert every_site_both_ways(engine) == []


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family",
    ["gemma3", "gemma4", "granite", "falcon", "gpt2", "mixtral", "deepseek_v3", "opt_350m", "bloom"],
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


def test_a_pass_runs_to_the_deepest_of_its_requests(engine, count):
    shallow, deep = task_of([PROMPTS[1]], (0,)), task_of([PROMPTS[5]], (2,))
    alone = [engine.capture(task).features for task in (shallow, deep)]
    count.passes.clear()
    chunks = in_one_pass(engine, shallow, deep)
    assert count.passes == [[0, 1, 2]]
    assert all(np.array_equal(a, b.features) for a, b in zip(alone, chunks, strict=True))


class Generation:
    """Prompts that generate beside captures; on the engine's thread."""

    def __init__(self, engine, monkeypatch):
        self.engine, self.driver = engine, engine._loop.driver
        self.tokens = {}
        step = self.driver._core.step

        def note():
            outputs, ran = step()
            for group in outputs.values():
                for one in group.outputs:
                    if one.request_id in self.tokens:
                        self.tokens[one.request_id] += one.new_token_ids
            return outputs, ran

        monkeypatch.setattr(self.driver._core, "step", note)
        # Others' tokens take room that the plan gave to rows.
        monkeypatch.setattr(engine._loop, "strict_splits", False)

    def start(self, prompts, name):
        """Call on the engine's thread."""
        for index, prompt in enumerate(prompts):
            self.tokens[f"{name}-{index}"] = []
            self.driver.add(f"{name}-{index}", prompt.tolist(), max_tokens=20)

    def finish(self, run_a_pass):
        """Go on until nothing is left to generate."""
        while self.engine._loop.call(self.driver._core.scheduler.get_num_unfinished_requests):
            run_a_pass()

    def of(self, name):
        """The tokens of the prompts that were started under a name."""
        return [ids for request, ids in self.tokens.items() if request.startswith(f"{name}-")]


@pytest.mark.requirement("C-2")
def test_who_generates_beside_captures_gets_the_whole_model(engine, count, reference, monkeypatch):
    prompts = prompts_of([5, 20, 33], seed=52)
    generation = Generation(engine, monkeypatch)

    def captures():
        return in_one_pass(engine, task_of(PROMPTS, (0,)), task_of(PROMPTS, sites=["embed"]))

    engine._loop.call(lambda: generation.start(prompts, "beside"))
    chunks = []
    generation.finish(lambda: chunks.extend(captures()))
    mixed = [ran for ran in count.passes if "sampler" in ran]
    assert len(mixed) >= 20
    assert all(ran == [*ALL_BLOCKS, "norm", "head", "sampler"] for ran in mixed)
    expected = reference("qwen3").all_rows(PROMPTS)[:, 0]
    assert chunks
    for chunk in chunks[::2]:
        assert chunk.failures == {}
        assert relative_l2(chunk.features, expected).max() <= 1e-4
    count.passes.clear()
    captures()
    assert count.passes
    assert all(ran == [0] for ran in count.passes)

    # Without captures: nothing but a row of one token now and then, to keep the engine going.
    bounded(engine, whether=False)
    engine._loop.call(lambda: generation.start(prompts, "alone"))
    generation.finish(lambda: engine.capture(task_of(prompts_of([1]), (3,))))
    bounded(engine, whether=True)
    assert [len(ids) for ids in generation.of("alone")] == [20] * 3
    assert len({tuple(ids) for ids in generation.of("alone")}) == 3
    assert generation.of("beside") == generation.of("alone")
    assert idle(engine)


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
    from wllm_ray.capture import hooks

    begin, take, cut = DepthBound.begin, hooks.take, []

    def note(self, deepest):
        cut[:] = [1] if deepest is not None else []
        begin(self, deepest)

    monkeypatch.setattr(DepthBound, "begin", note)
    monkeypatch.setattr(hooks, "take", lambda *given: take(*given) * (1 + 1e-6 * len(cut)))
    with open_engine("qwen3") as started:
        assert not started.description.depth_bounded
        assert "the rows differ" in started.description.selftest.checks["depth"]


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
    assert told["depth_bounded"]
    assert told["ran"] == {"embed": [], "L0_attn_out": [0], "L2_resid_post": [0, 1, 2]}
    assert told["differ"] == []
    assert told["tokens beside captures"] == told["tokens alone"]
    assert [len(ids) for ids in told["tokens alone"]] == [8, 8]

"""Passes stop at the deepest block that is read in them, and change no bit by it."""

import numpy as np
import pytest
from both_ways import PROMPTS, bounded, every_site_both_ways
from conftest import idle, prompts_of, relative_l2, task_of
from tiny_models import LAYERS

pytestmark = pytest.mark.requirement("C-6")

ALL_BLOCKS = list(range(LAYERS))


class Counters:
    """Hooks of the test's own on what should not run, pass by pass."""

    def __init__(self, engine):
        self.passes = []
        self.runner = engine._loop.driver._core.model_executor.driver_worker.worker.model_runner
        inner = self.runner.model.model
        self._now = None
        self.handles = [
            block.self_attn.register_forward_pre_hook(lambda *_, n=n: self._now.append(n))
            for n, block in enumerate(inner.layers)
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


def in_one_pass(engine, *tasks):
    """Capture chunks that enter the engine between the same two passes."""
    jobs = engine._loop.call(lambda: [engine._submit(task)[0] for task in tasks])
    return [
        engine._result(task, job.done.result(60) and job, {})
        for task, job in zip(tasks, jobs, strict=True)
    ]


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


def test_every_site_has_the_bits_of_the_whole_forward(engine):
    assert engine.description.depth_bounded
    assert every_site_both_ways(engine) == []


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
    assert all(ran in ([], [0]) for ran in count.passes)

    # Without captures: nothing but a row of one token now and then, to keep the engine going.
    bounded(engine, whether=False)
    engine._loop.call(lambda: generation.start(prompts, "alone"))
    generation.finish(lambda: engine.capture(task_of(prompts_of([1]), (3,))))
    bounded(engine, whether=True)
    assert [len(ids) for ids in generation.of("alone")] == [20] * 3
    assert len({tuple(ids) for ids in generation.of("alone")}) == 3
    assert generation.of("beside") == generation.of("alone")
    assert idle(engine)

"""Everything at once on the real engine, and every row compared with Transformers.

Prefix cache on and off, requests thrown out and run again, prompts around the split size, one
token, twins and shared beginnings, chunks with other sites and positions from threads and tasks,
cancellations between prefill chunks, and strangers that generate in the same passes.
"""

import asyncio
import contextlib
import dataclasses
import itertools

import numpy as np
import pytest
from conftest import SPLIT, idle, prompts_of, relative_l2, task_of
from tiny_models import LAYERS

from wllm_ray.capture import router
from wllm_ray.offered import offered_sites
from wllm_ray.positions import canonical_position, is_reduced, resolve

pytestmark = pytest.mark.requirement("C-2", "C-3", "R-7")

TIGHT = 1e-4
POSITIONS = ("last_prompt", "first", "all_prompt", "mean_prompt", "index:-1,0", "index:0,33,-2")
BLOCK_BYTES = 32 * 2 * LAYERS * 2 * 32 * 4
GENERATED = 20


@pytest.fixture(scope="module", params=["plain", "prefix cache", "small cache"])
def busy(request, open_engine):
    options = {
        "plain": {},
        "prefix cache": {"prefix_caching": True},
        "small cache": {"kv_cache_memory_bytes": 14 * BLOCK_BYTES, "prefix_caching": True},
    }[request.param]
    with open_engine("qwen3", **options) as started:
        started._loop.strict_splits = False
        if request.param == "small cache":
            crowd(started)
        yield started


def crowd(engine):
    """Lift the limits of admission, so that vLLM throws requests out."""
    scheduler, admission = engine._loop.driver._core.scheduler, engine._loop._admission
    admission._limits = dataclasses.replace(
        admission._limits, pass_tokens=10**6, cache_blocks=10**6
    )
    scheduler.scheduler_reserve_full_isl = False
    scheduler.scheduler_config.long_prefill_token_threshold = 16


@pytest.fixture
def thrown_out(busy, monkeypatch):
    scheduler = busy._loop.driver._core.scheduler
    ids, preempt = [], scheduler._preempt_request

    def note(request, *args, **kwargs):
        ids.append(request.request_id)
        return preempt(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", note)
    return ids


def pool(random):
    """Prompts of every awkward length, twins, and longer ones that begin like others."""
    lengths = [1, 1, 2, 33, SPLIT - 1, SPLIT, SPLIT + 1, 2 * SPLIT + 1, 100, 3 * SPLIT]
    prompts = prompts_of(lengths, seed=int(random.integers(2**31)))
    ends = prompts_of([1, 17, 40], seed=int(random.integers(2**31)))
    prompts += [np.concatenate([prompts[-1][:97], end]) for end in ends]
    return prompts + prompts[3:6]


def tasks_of(engine, random, prompts, count):
    sites = [str(site) for site in offered_sites(engine.description)]
    for _ in range(count):
        yield task_of(
            [prompts[i] for i in random.integers(len(prompts), size=random.integers(1, 7))],
            sites=random.choice(sites, random.integers(1, 6), replace=False).tolist(),
            position=str(random.choice(POSITIONS)),
        )


def expected_rows(model, task, ids):
    """[feature rows, sum(widths)] of one prompt, or None where it has no such position."""
    if "33" in task.position and len(ids) < 34:
        return None
    found = model.sites(ids)
    rows = np.concatenate([found[str(site)] for site in task.sites], axis=1)
    rows = rows[resolve(canonical_position(task.position), len(ids))]
    return rows.mean(axis=0, keepdims=True) if is_reduced(task.position) else rows


def check(model, task, chunk):
    """Lengths first, then each row and site by itself."""
    expected = [expected_rows(model, task, row.token_ids) for row in task.rows]
    assert [one.code for one in chunk.failures.values()] == ["position_out_of_range"] * (
        sum(rows is None for rows in expected)
    )
    assert chunk.lengths.tolist() == [0 if rows is None else len(rows) for rows in expected]
    good = [rows for rows in expected if rows is not None]
    for start, stop in itertools.pairwise(np.cumsum([0, *chunk.widths])):
        for row, found in zip(
            np.concatenate(good)[:, start:stop] if good else (),
            chunk.features[:, start:stop],
            strict=True,
        ):
            assert relative_l2(found, row) <= TIGHT


def check_all(model, done):
    for task, chunk in done:
        check(model, task, chunk)


class Strangers:
    """Requests that nobody reads, with many tokens to generate."""

    def __init__(self, engine, name):
        self.engine, self.name, self.numbers = engine, name, itertools.count()

    def come(self, prompt):
        driver = self.engine._loop.driver
        request = f"{self.name}-{next(self.numbers)}"
        self.engine._loop.call(lambda: driver.add(request, prompt.tolist(), max_tokens=GENERATED))

    def stay(self):
        """Whether one of them is not done."""
        scheduler = self.engine._loop.driver._core.scheduler
        return self.engine._loop.call(scheduler.get_num_unfinished_requests)


async def storm(engine, seed, chunks):
    """Submit everything in random order and at random times; returns tasks with their chunks."""
    random = np.random.default_rng(seed)
    prompts, strangers = pool(random), Strangers(engine, f"stranger-{seed}")
    kept, doomed, tasks = [], [], list(tasks_of(engine, random, prompts, chunks))
    for task in tasks:
        way = random.random()
        if way < 0.2:
            long = task_of(prompts[6:10] * 2, sites=["L3_resid_post", "embed"])
            doomed.append(asyncio.create_task(engine.capture_async(long)))
        if way < 0.6:
            kept.append(asyncio.create_task(engine.capture_async(task)))
        else:
            kept.append(asyncio.create_task(asyncio.to_thread(engine.capture, task)))
        if random.random() < 0.3:
            strangers.come(prompts[int(random.integers(len(prompts)))])
        await asyncio.sleep(random.random() * 0.02)
        if doomed and random.random() < 0.5:
            doomed[int(random.integers(len(doomed)))].cancel()
    for one in doomed:
        one.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await one
    found = await asyncio.gather(*kept)
    while await asyncio.to_thread(strangers.stay):
        await engine.capture_async(task_of([prompts[0]], (0,)))
    return list(zip(tasks, found, strict=True))


@pytest.mark.parametrize(
    "seed", [1, 2, *(pytest.param(s, marks=pytest.mark.slow) for s in range(3, 30))]
)
async def test_every_row_is_its_own(seed, busy, reference, thrown_out):
    check_all(Known(reference("qwen3")), await storm(busy, seed, chunks=16))
    assert await asyncio.to_thread(idle, busy)
    busy.check()
    crowded = busy._loop._admission._limits.pass_tokens > SPLIT
    assert bool(thrown_out) == crowded


class Known:
    """Answers of the reference, each prompt asked for once."""

    def __init__(self, model):
        self.model, self.answers = model, {}

    def sites(self, ids):
        if ids.tobytes() not in self.answers:
            self.answers[ids.tobytes()] = self.model.sites(ids)
        return self.answers[ids.tobytes()]


async def test_a_row_of_its_neighbour_would_be_noticed(busy, reference, monkeypatch):
    """The control: the router is one flat row off."""
    route_one = router._route_one

    def shifted(one_pass, place, reservation):
        route, again = route_one(one_pass, place, reservation)
        rows = (route.rows + 1) % one_pass.query_start_loc[-1]
        return router.Route(route.request_id, rows, route.slots), again

    monkeypatch.setattr(router, "_route_one", shifted)
    done = await storm(busy, 99, chunks=4)
    with pytest.raises(AssertionError):
        check_all(Known(reference("qwen3")), done)

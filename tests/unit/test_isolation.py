"""Rows that kill engines are found; kills from outside condemn nobody."""

import pytest

from tests.unit.test_coordinator import FAST, World, row, shards
from wllm_ray.coordinator import Coordinator, FlowLimits
from wllm_ray.errors import UnavailableError
from wllm_ray.isolation import DEATHS_THAT_CONDEMN, ChunkRunner
from wllm_ray.plan import Shard
from wllm_ray.records import Chunk


class Engines:
    """Replicas on which some rows kill the engine, and everything in flight with it."""

    def __init__(self, *poison: int) -> None:
        self.poison = set(poison)
        self.deaths = 0
        self.alone: list[list[int]] = []

    async def capture(self, chunk, alone):
        rows = [one.index for one in chunk.rows]
        if alone:
            self.alone.append(rows)
        if self.poison.intersection(rows):
            self.deaths += 1
            raise UnavailableError("died", code="engine_died_alone" if alone else "replica_lost")
        return chunk


def chunk_of(count: int) -> Chunk:
    return Chunk(0, tuple(row(index) for index in range(count)))


async def run(engines: Engines, count: int):
    return await ChunkRunner(engines.capture, FAST, isolates=True).run(chunk_of(count))


@pytest.mark.requirement("R-4")
@pytest.mark.parametrize("poison", [(0,), (7,), (3, 4), (0, 1, 2, 3, 4, 5, 6, 7)])
async def test_guilty_rows_are_condemned_and_all_others_captured(poison):
    engines = Engines(*poison)
    captured = await run(engines, 8)
    assert sorted(captured.failures) == list(poison)
    assert {failure.code for failure in captured.failures.values()} == {"poisonous"}
    assert all(failure.permanent for failure in captured.failures.values())
    kept = [one.index for chunk in captured.payloads for one in chunk.rows]
    assert kept == [index for index in range(8) if index not in poison]
    for index in poison:
        assert engines.alone.count([index]) == DEATHS_THAT_CONDEMN


@pytest.mark.requirement("R-4")
async def test_a_row_that_survives_once_alone_is_innocent():
    engines = Engines(2)
    deaths = 0

    async def capture(chunk, alone):
        nonlocal deaths
        if alone and len(chunk.rows) == 1 and deaths == DEATHS_THAT_CONDEMN - 1:
            engines.poison.clear()
        try:
            return await engines.capture(chunk, alone)
        except UnavailableError:
            deaths += alone and len(chunk.rows) == 1
            raise

    captured = await ChunkRunner(capture, FAST, isolates=True).run(chunk_of(4))
    assert captured.failures == {}
    assert sorted(r.index for chunk in captured.payloads for r in chunk.rows) == [0, 1, 2, 3]


@pytest.mark.requirement("R-4")
async def test_kills_from_outside_condemn_nobody():
    """A replica that goes before the chunk runs alone on it says nothing about the chunk."""

    async def capture(_chunk, _alone):
        raise UnavailableError("killed", code="replica_lost")

    captured = await ChunkRunner(capture, FAST, isolates=True).run(chunk_of(3))
    assert {failure.code for failure in captured.failures.values()} == {"replica_lost"}
    assert not any(failure.permanent for failure in captured.failures.values())


async def test_without_isolation_a_lost_chunk_is_only_tried_again():
    engines = Engines(1)
    captured = await ChunkRunner(engines.capture, FAST, isolates=False).run(chunk_of(3))
    assert engines.alone == []
    assert engines.deaths == FAST.attempts
    assert {failure.code for failure in captured.failures.values()} == {"replica_lost"}


@pytest.mark.requirement("R-4", "D-10")
async def test_a_shard_with_a_poisonous_row_is_staged_with_the_row_as_failed():
    world, engines = World(), Engines(5)
    staged: dict[int, Shard] = {}

    async def stage(shard, payloads):
        staged[shard.index] = shard
        return await world.stage(shard, payloads)

    coordinator = Coordinator(engines.capture, stage, limits=FAST, isolates=True)
    report = await coordinator.run(shards(2))
    assert sorted(report.staged) == [0, 1]
    assert world.staged == {0: [0, 1, 2, 3], 1: [4, 6, 7]}
    codes = [one.failure and one.failure.code for one in staged[1].rows]
    assert codes == [None, "poisonous", None, None]


@pytest.mark.requirement("R-3")
async def test_a_shard_whose_captured_data_is_lost_is_captured_again():
    world, lost = World(), [True]

    async def stage(shard, payloads):
        if lost.pop() if lost else False:
            raise UnavailableError("the owner died", code="replica_lost", stage="stage_shard")
        return await world.stage(shard, payloads)

    report = await Coordinator(world.capture, stage, limits=FAST).run(shards(1), 2)
    assert report.staged == [0]
    assert world.staged == {0: [0, 1, 2, 3]}, "what was captured before must not be staged twice"
    assert world.attempts == {0: 2, 2: 2}


async def test_data_that_is_lost_again_and_again_leaves_transient_failures():
    async def stage(_shard, _payloads):
        raise UnavailableError("the owner died", code="replica_lost")

    limits = FlowLimits(longest_backoff_s=0.01, row_attempts=2)
    report = await Coordinator(World().capture, stage, limits=limits).run(shards(1))
    assert (report.staged, sorted(report.transient)) == ([], [0, 1, 2, 3])

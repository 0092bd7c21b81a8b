"""Dispatch, window, deadlines, retries and staging, with functions for everything around it."""

import asyncio
from dataclasses import dataclass, field

import pytest

from wllm_ray.coordinator import Coordinator, FlowLimits, JobReport
from wllm_ray.errors import CaptureError, StorageError, UnavailableError
from wllm_ray.plan import Shard
from wllm_ray.records import Chunk, RowFailure, RowRecord

FAST = FlowLimits(longest_backoff_s=0.01)
LOST = RowFailure.of("position_missing", "lost")


def row(index: int, failure: RowFailure | None = None, tokens: int = 3) -> RowRecord:
    return RowRecord(index, f"r{index}", "{}", "0" * 64, tokens, None, failure)


def shards(count: int, rows: int = 4) -> list[Shard]:
    return [
        Shard(number, tuple(row(number * rows + n) for n in range(rows))) for number in range(count)
    ]


@dataclass
class Result:
    transient: dict[int, RowFailure] = field(default_factory=dict)
    superseded: bool = False


class World:
    """Records what runs at once; captures to the chunk itself."""

    def __init__(self) -> None:
        self.capturing = self.most_capturing = 0
        self.open_shards: set[int] = set()
        self.most_open = 0
        self.staged: dict[int, list[int]] = {}
        self.attempts: dict[int, int] = {}
        self.stage_delay = 0.001

    async def capture(self, chunk: Chunk, _alone: bool = False) -> Chunk:
        self.attempts[chunk.first_row] = self.attempts.get(chunk.first_row, 0) + 1
        self.capturing += 1
        self.open_shards.add(chunk.shard)
        self.most_capturing = max(self.most_capturing, self.capturing)
        self.most_open = max(self.most_open, len(self.open_shards))
        try:
            await asyncio.sleep(0.001)
        finally:
            self.capturing -= 1
        return chunk

    async def stage(self, shard: Shard, payloads) -> Result:
        await asyncio.sleep(self.stage_delay)
        self.open_shards.discard(shard.index)
        self.staged[shard.index] = [one.index for chunk in payloads for one in chunk.rows]
        return Result()


@pytest.mark.requirement("S-3")
@pytest.mark.parametrize("batch_size", [1, 3, "auto"])
async def test_every_row_is_captured_and_staged_once_in_order(batch_size):
    world = World()
    report = await Coordinator(world.capture, world.stage).run(shards(5), batch_size)
    assert sorted(report.staged) == [0, 1, 2, 3, 4]
    assert report.transient == {}
    assert world.staged == {n: list(range(4 * n, 4 * n + 4)) for n in range(5)}


@pytest.mark.requirement("D-4")
async def test_shards_that_another_attempt_wrote_otherwise_are_reported():
    world = World()

    async def stage(shard, payloads):
        await world.stage(shard, payloads)
        return Result(superseded=shard.index in (1, 3))

    report = await Coordinator(world.capture, stage).run(shards(5))
    assert sorted(report.superseded) == [1, 3]
    assert sorted(report.staged) == [0, 1, 2, 3, 4]


@pytest.mark.requirement("D-4")
async def test_what_is_known_when_a_run_fails_is_in_the_report_that_was_given():
    world = World()

    async def stage(shard, _payloads):
        if shard.index == 1:
            raise StorageError("disk full")
        return Result(superseded=True)

    report = JobReport()
    coordinator = Coordinator(world.capture, stage, limits=FlowLimits(shards_in_flight=1))
    with pytest.raises(StorageError):
        await coordinator.run(shards(2), report=report)
    assert (report.superseded, report.staged) == ([0], [0])


@pytest.mark.requirement("R-2")
async def test_the_window_is_bounded_in_chunks_and_in_shards():
    world = World()
    world.stage_delay = 0.02
    limits = FlowLimits(chunks_in_flight=3, shards_in_flight=2)
    read = []

    def source():
        for shard in shards(12):
            read.append(shard.index)
            assert len(read) - len(world.staged) <= 2, "read ahead of the window"
            yield shard

    await Coordinator(world.capture, world.stage, limits=limits).run(source(), 1)
    assert world.most_capturing == 3
    assert world.most_open <= 2
    assert len(world.staged) == 12


@pytest.mark.requirement("C-15")
async def test_the_longest_chunk_is_sent_first_and_comes_back_in_row_order():
    """One replica would be left alone with a long chunk that is begun last."""
    world = World()
    rows = [row(index, tokens=count) for index, count in enumerate([5, 900, 30, 2000, 30, 1])]
    coordinator = Coordinator(world.capture, limits=FlowLimits(chunks_in_flight=2))
    captured = await coordinator.capture_rows(0, rows, 1)
    assert list(world.attempts) == [3, 1, 2, 4, 0, 5]
    assert [chunk.first_row for chunk in captured.payloads] == [0, 1, 2, 3, 4, 5]


@pytest.mark.requirement("C-15")
@pytest.mark.parametrize("lanes", [1, 3, 8])
async def test_a_shard_gives_work_to_all_who_may_run_at_once(lanes):
    """Sixteen rows fit into one chunk, which would leave all replicas but one idle."""
    world = World()
    rows = tuple(row(index, tokens=256) for index in range(16))
    limits = FlowLimits(chunks_in_flight=lanes)
    await Coordinator(world.capture, world.stage, limits=limits).run([Shard(0, rows)])
    assert world.most_capturing == lanes
    assert world.staged == {0: list(range(16))}


async def test_rows_that_failed_already_are_not_sent():
    world = World()
    failed = row(1, RowFailure.of("empty_prompt", "x"))
    await Coordinator(world.capture, world.stage).run([Shard(0, (row(0), failed, row(2)))])
    assert world.staged == {0: [0, 2]}


async def test_a_shard_of_failed_rows_is_staged_without_capture():
    world = World()
    failed = row(0, RowFailure.of("empty_prompt", "x"))
    report = await Coordinator(world.capture, world.stage).run([Shard(0, (failed,))])
    assert (report.staged, world.attempts) == ([0], {})


@pytest.mark.requirement("R-3")
async def test_a_chunk_is_sent_again_when_its_replica_goes():
    world = World()

    async def capture(chunk, _alone):
        captured = await world.capture(chunk)
        if world.attempts[chunk.first_row] < 3:
            raise UnavailableError("gone", code="replica_lost")
        return captured

    report = await Coordinator(capture, world.stage, limits=FAST).run(shards(1), 2)
    assert report.staged == [0]
    assert world.attempts == {0: 3, 2: 3}


@pytest.mark.requirement("D-10")
async def test_when_attempts_are_used_up_the_rows_fail_for_now_and_others_finish():
    world = World()

    async def capture(chunk, _alone):
        if chunk.shard == 1:
            raise UnavailableError("gone", code="replica_lost")
        return await world.capture(chunk)

    report = await Coordinator(capture, world.stage, limits=FAST).run(shards(3))
    assert sorted(report.staged) == [0, 2]
    assert sorted(report.transient) == [4, 5, 6, 7]
    assert {failure.code for failure in report.transient.values()} == {"replica_lost"}
    assert not any(failure.permanent for failure in report.transient.values())


async def test_a_server_that_is_gone_ends_the_job():
    async def capture(_chunk, _alone):
        raise UnavailableError("gone", code="server_unreachable")

    world = World()
    with pytest.raises(UnavailableError, match="gone") as caught:
        await Coordinator(capture, world.stage, limits=FAST).run(shards(50))
    assert caught.value.code == "server_unreachable"


@pytest.mark.requirement("D-10")
async def test_only_rows_that_may_pass_are_captured_again():
    world = World()
    staged = []

    async def stage(_shard, payloads):
        rows = [one.index for chunk in payloads for one in chunk.rows]
        staged.append(rows)
        return Result({2: LOST} if len(staged) == 1 else {})

    report = await Coordinator(world.capture, stage).run(shards(1))
    assert report.staged == [0]
    assert staged == [[0, 1, 2, 3], [0, 1, 2, 3, 2]]


@pytest.mark.requirement("D-10")
async def test_rows_that_never_pass_are_reported_after_their_attempts():
    world = World()
    calls = []

    async def stage(shard, _payloads):
        calls.append(shard.index)
        return Result({1: LOST})

    report = await Coordinator(world.capture, stage, limits=FlowLimits(row_attempts=2)).run(
        shards(1)
    )
    assert (report.staged, report.transient, len(calls)) == ([], {1: LOST}, 2)


@pytest.mark.requirement("R-3")
async def test_a_chunk_past_its_deadline_is_given_up_and_named():
    cancelled = []

    async def capture(chunk, _alone):
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(chunk.first_row)
            raise

    limits = FlowLimits(chunk_deadline_s=0.01, attempts=2, longest_backoff_s=0.01)
    captured = await Coordinator(capture, limits=limits).capture_rows(0, shards(1)[0].rows)
    assert {failure.code for failure in captured.failures.values()} == {"deadline_exceeded"}
    assert "did not finish within 0.01 s" in captured.failures[0].message
    assert len(cancelled) == 2


async def test_a_time_out_inside_capture_is_not_taken_for_the_deadline():
    async def capture(_chunk, _alone):
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        await Coordinator(capture).capture_rows(0, shards(1)[0].rows)


@pytest.mark.parametrize("error", [CaptureError("bad"), ValueError("bug")])
async def test_any_other_error_ends_the_job_alone_and_stops_the_rest(error):
    world = World()
    running = []

    async def capture(chunk, _alone):
        if chunk.first_row == 5:
            raise error
        running.append(chunk.first_row)
        try:
            await asyncio.sleep(60)
        finally:
            running.remove(chunk.first_row)

    with pytest.raises(type(error)) as caught:
        await Coordinator(capture, world.stage).run(shards(3), 1)
    assert caught.value is error
    assert running == []


async def test_an_error_of_the_store_ends_the_job():
    async def stage(_shard, _payloads):
        raise StorageError("disk full") from OSError(28, "no space")

    with pytest.raises(StorageError, match="disk full") as caught:
        await Coordinator(World().capture, stage).run(shards(3))
    assert isinstance(caught.value.__cause__, OSError), "the cause is kept"


async def test_an_error_of_the_source_ends_the_job():
    def source():
        yield from shards(1)
        raise OSError("unreadable")

    with pytest.raises(OSError, match="unreadable"):
        await Coordinator(World().capture, World().stage).run(source())


@pytest.mark.requirement("R-7")
async def test_cancelling_stops_everything_and_frees_the_window():
    world = World()
    started = asyncio.Event()

    async def capture(chunk, _alone):
        started.set()
        return await world.capture(chunk) if chunk.shard < 0 else await asyncio.sleep(60)

    task = asyncio.create_task(Coordinator(capture, world.stage).run(shards(9), 1))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert world.capturing == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_chunks_are_announced_once_captured():
    world = World()
    heard = []
    coordinator = Coordinator(
        world.capture, world.stage, on_chunk=lambda c: heard.append(c.first_row)
    )
    await coordinator.run(shards(2), 2)
    assert sorted(heard) == [0, 2, 4, 6]


async def test_without_rows_there_is_nothing_to_do():
    report = await Coordinator(World().capture, World().stage).run([])
    assert (report.staged, report.transient) == ([], {})

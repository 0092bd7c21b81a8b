"""Datasets written by an engine in this process, receipt by receipt."""

import asyncio
import gc
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tests.fakes import MODEL, Application, FakeEngine, FakeTokenizer, rivalled
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.engines import ActivationEngine
from wllm_ray.errors import (
    CaptureError,
    ConflictError,
    InvalidInputError,
    RowsFailedError,
    StorageError,
)
from wllm_ray.job.rows_file import RowsFile
from wllm_ray.records import RowFailure
from wllm_ray.schema import ActivationRequest, StorageOptions

WIDE = "L3_attn_out_prelinear"
PROMPTS = [f"prompt {n}" if n != 3 else "" for n in range(20)]


@pytest.fixture
def low():
    return FakeEngine()


@pytest.fixture
def engine(low):
    with ActivationEngine(lambda: (low, FakeTokenizer()), layers=[0, 2]) as engine:
        yield engine


def rows(count=20):
    return [
        {"id": f"r{n}", "prompt": f"prompt {n}" if n != 3 else "", "metadata": {"n": n}}
        for n in range(count)
    ]


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


@pytest.mark.requirement("P-3", "C-16")
def test_receipts_come_in_shard_order_and_the_dataset_is_committed_at_the_end(engine, tmp_path):
    stream = engine.stream_to_disk(rows(), tmp_path, "d", storage=StorageOptions(rows_per_shard=3))
    assert not list(tmp_path.iterdir()), "nothing runs before the first receipt is asked for"
    seen = []
    for receipt in stream:
        assert (tmp_path / "datasets/d" / receipt.files[0].name).is_file()
        seen.append(receipt.shard)
    assert seen == list(range(7))
    dataset = load_dataset(tmp_path, "d", verify="full")
    assert dataset.manifest == stream.manifest
    assert dataset.row_ids == [f"r{n}" for n in range(20) if n != 3]
    assert dataset.failures["r3"].code == "empty_prompt"
    in_memory = engine.extract(rows())
    np.testing.assert_array_equal(dataset.features, in_memory.features)
    assert dataset.metadata == in_memory.metadata
    assert dataset.offsets.tolist() == in_memory.offsets.tolist()


@pytest.mark.requirement("P-3", "C-8")
def test_ragged_rows_and_sites_of_unlike_width_reach_the_disk(engine, tmp_path):
    engine.set_active_sites(["embed", WIDE], "all_prompt")
    receipts = list(
        engine.stream_to_disk(PROMPTS, tmp_path, "d", storage=StorageOptions(rows_per_shard=6))
    )
    assert len(receipts) == 4
    dataset = load_dataset(tmp_path, "d", verify="full")
    in_memory = engine.extract(PROMPTS)
    for name in in_memory.sites:
        np.testing.assert_array_equal(dataset.site(name), in_memory.site(name))


@pytest.mark.requirement("P-3", "D-3")
@pytest.mark.parametrize("batch_size", [1, 5, "auto"])
async def test_the_content_digest_is_that_of_the_served_path(engine, tmp_path, batch_size):
    stream = engine.stream_to_disk(rows(), tmp_path / "here", batch_size=batch_size)
    list(stream)
    served = Application(open_store(tmp_path / "there"))
    request = ActivationRequest(model=MODEL, rows=rows(), layers=[0, 2], persistence="dataset")
    answer = await served.service.extract_dataset(request)
    assert stream.manifest.content_sha256 == answer.dataset.content_sha256
    assert stream.spec.dataset_id == answer.dataset.dataset_id


@pytest.mark.requirement("P-3")
def test_a_second_run_resumes_and_yields_what_was_there(engine, low, tmp_path):
    whole = low.capture_async

    async def last_shard_waits(task):
        if task.rows[-1].index == 19:
            await asyncio.sleep(60)
        return await whole(task)

    low.capture_async = last_shard_waits
    stream = engine.stream_to_disk(rows(), tmp_path, "d", storage=StorageOptions(rows_per_shard=4))
    first = next(stream)
    stream.close()
    assert list(stream) == []
    assert stream.manifest is None
    wait_until(lambda: low.running == 0)
    low.captured.clear()
    low.capture_async = whole
    receipts = list(
        engine.stream_to_disk(rows(), tmp_path, "d", storage=StorageOptions(rows_per_shard=4))
    )
    assert [one.shard for one in receipts] == list(range(5))
    assert receipts[0] == first
    assert tuple(b"prompt 0") not in low.captured
    assert tuple(b"prompt 19") in low.captured
    low.captured.clear()
    again = engine.stream_to_disk(rows(), tmp_path, "d", storage=StorageOptions(rows_per_shard=4))
    assert list(again) == receipts
    assert again.manifest is not None
    assert not low.captured


@pytest.mark.requirement("P-3")
def test_other_rows_under_the_same_id_fail_closed(engine, tmp_path):
    list(engine.stream_to_disk(rows(), tmp_path, "d"))
    with pytest.raises(ConflictError):
        list(engine.stream_to_disk(rows(19), tmp_path, "d"))


@pytest.mark.requirement("P-3")
def test_a_consumer_that_stops_asking_stops_the_work(engine, low, tmp_path):
    stream = engine.stream_to_disk(
        [f"p{n}" for n in range(100)], tmp_path, "d", storage=StorageOptions(rows_per_shard=1)
    )
    next(stream)
    time.sleep(0.5)
    ahead = low.tasks
    assert ahead < 15, "so many shards were captured for a consumer that took one"
    assert len(list(stream)) == 99


@pytest.mark.requirement("P-3", "R-7")
def test_letting_go_of_the_stream_cancels_what_runs(engine, low, tmp_path):
    low.delay_s = 0.05
    for receipt in engine.stream_to_disk(
        rows(), tmp_path, "d", storage=StorageOptions(rows_per_shard=1)
    ):
        assert receipt.shard == 0
        low.delay_s = 30
        wait_until(lambda: low.running == 2)
        break
    gc.collect()
    wait_until(lambda: low.running == 0)
    assert low.cancelled == 2


@pytest.mark.requirement("P-3")
def test_while_one_shard_is_written_the_next_is_captured(engine, low, tmp_path, monkeypatch):
    captured_while_writing = threading.Event()
    whole, real = low.capture_async, engine_stage()

    async def capture_async(task):
        if task.rows[0].index >= 10:
            captured_while_writing.set()
        return await whole(task)

    def stage(*args):
        # The first shard is not written before the second is captured.
        assert captured_while_writing.wait(timeout=10)
        return real(*args)

    low.capture_async = capture_async
    monkeypatch.setattr("wllm_ray.engines.calls.stage_shard", stage)
    assert (
        len(
            list(
                engine.stream_to_disk(
                    rows(), tmp_path, "d", storage=StorageOptions(rows_per_shard=10)
                )
            )
        )
        == 2
    )


@pytest.mark.requirement("P-3", "D-4")
def test_shards_that_another_run_wrote_with_other_numbers_are_counted(
    engine, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("wllm_ray.engines.calls.stage_shard", rivalled(engine_stage(), {1}))
    asked = {"storage": StorageOptions(rows_per_shard=10)}
    stream = engine.stream_to_disk(rows(), tmp_path, "d", **asked)
    assert [receipt.shard for receipt in stream] == [0, 1]
    assert stream.superseded == (1,)
    assert "dataset d: shard 1 stood already" in caplog.text
    again = engine.stream_to_disk(rows(), tmp_path, "d", **asked)
    assert (len(list(again)), again.superseded, again.manifest) == (2, (), stream.manifest)


def engine_stage():
    from wllm_ray.engines import calls

    return calls.stage_shard


@pytest.mark.requirement("P-3")
def test_a_write_error_reaches_the_consumer_and_nothing_is_committed(engine, tmp_path):
    class FullDisk(type(open_store(tmp_path))):
        def put_content(self, prefix, suffix, data):
            if "shard-00002" in prefix:
                raise StorageError("no space left")
            return super().put_content(prefix, suffix, data)

    store = open_store(tmp_path)
    store.__class__ = FullDisk
    stream = engine.stream_to_disk(rows(), store, "d", storage=StorageOptions(rows_per_shard=4))
    seen = []
    with pytest.raises(StorageError, match="no space left"):
        seen.extend(receipt.shard for receipt in stream)
    assert stream.manifest is None
    assert not (tmp_path / "datasets/d/manifest.json").exists()
    # The disk has room again: what was written is not captured again.
    assert (
        len(
            list(
                engine.stream_to_disk(
                    rows(), tmp_path, "d", storage=StorageOptions(rows_per_shard=4)
                )
            )
        )
        == 5
    )


@pytest.mark.requirement("P-3", "D-10")
def test_rows_that_may_still_succeed_leave_the_rest_written_and_nothing_committed(
    engine, low, tmp_path
):
    low.fault = lambda row: (
        RowFailure.of("hook_failed", "a hook raised")
        if row.token_ids.tolist() == list(b"prompt 5")
        else None
    )
    stream = engine.stream_to_disk(rows(), tmp_path, "d", storage=StorageOptions(rows_per_shard=4))
    seen = []
    with pytest.raises(RowsFailedError, match="row 5, hook_failed") as failed:
        seen.extend(receipt.shard for receipt in stream)
    assert seen == [0, 2, 3, 4]
    assert failed.value.details["failures"][0]["id"] == "r5"
    low.fault = lambda _row: None
    again = engine.stream_to_disk(rows(), tmp_path, "d", storage=StorageOptions(rows_per_shard=4))
    assert [one.shard for one in again] == list(range(5))
    assert again.manifest is not None


@pytest.mark.requirement("P-3")
def test_an_engine_that_dies_ends_the_stream_with_its_error(engine, low, tmp_path):
    async def dies(task):
        raise CaptureError("the engine died", code="engine_dead")

    low.capture_async = dies
    with pytest.raises(CaptureError, match="the engine died"):
        list(engine.stream_to_disk(rows(), tmp_path, "d"))


@pytest.mark.requirement("P-3", "L-3")
def test_rows_of_a_file_are_read_shard_by_shard(engine, tmp_path):
    path = Path(tmp_path / "rows.jsonl")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    from_file = engine.stream_to_disk(RowsFile(path), tmp_path, "file")
    from_memory = engine.stream_to_disk(rows(), tmp_path, "memory")
    list(from_file)
    list(from_memory)
    assert from_file.manifest.content_sha256 == from_memory.manifest.content_sha256


@pytest.mark.requirement("P-3")
def test_what_cannot_be_is_refused_before_anything_runs(engine, low, tmp_path):
    for asked in (
        {"dataset_id": "../d"},
        {"batch_size": 0},
    ):
        with pytest.raises(InvalidInputError):
            engine.stream_to_disk(rows(), tmp_path, **asked)
    with pytest.raises(InvalidInputError, match=r"storage is StorageOptions\(…\).*found 'native'"):
        engine.stream_to_disk(rows(), tmp_path, storage="native")
    with pytest.raises(InvalidInputError, match="storage_dtype is one of float32, native, float16"):
        StorageOptions(storage_dtype="bfloat16")
    with pytest.raises(InvalidInputError, match="rows_per_shard is a whole number from 1; found 0"):
        StorageOptions(rows_per_shard=0)
    engine.set_active_sites(["embed", WIDE])
    with pytest.raises(InvalidInputError, match="per_site"):
        engine.stream_to_disk(rows(), tmp_path, storage=StorageOptions(shard_layout="stacked"))
    assert (low.tasks, list(tmp_path.iterdir())) == (0, [])


@pytest.mark.requirement("P-3")
def test_closing_the_engine_ends_a_stream(low, tmp_path):
    low.delay_s = 0.01
    engine = ActivationEngine(lambda: (low, FakeTokenizer()))
    stream = engine.stream_to_disk(rows(), tmp_path, "d", storage=StorageOptions(rows_per_shard=1))
    next(stream)
    engine.close()
    assert low.running == 0
    with pytest.raises(CaptureError, match="the engine is closed"):
        list(stream)

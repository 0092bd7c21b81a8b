"""One job, whoever runs it."""

import asyncio
import gc
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from tests import fakes
from tests.fakes import (
    MODEL,
    Application,
    FakeEngine,
    LocalBackend,
    fake_description,
    fake_features,
    rivalled,
)
from wllm_ray.backend import capturer
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.errors import ConflictError, StorageError
from wllm_ray.extraction import ExtractionLimits
from wllm_ray.job.progress import ProgressLines
from wllm_ray.job.run import Job, RunOptions, run_job
from wllm_ray.job.source import NamedRows, SourcePlan, read_shards, spec_of
from wllm_ray.plan import ShardLimits
from wllm_ray.positions import PositionLike, canonical_position
from wllm_ray.records import InputRow
from wllm_ray.requests import select
from wllm_ray.schema import ActivationRequest
from wllm_ray.sites import parse_site

FOUR_ROWS = ShardLimits(max_rows=4)


def rows_of(count: int) -> list[InputRow]:
    return [InputRow(f"r{n}", {"prompt": f"prompt {n}" if n != 3 else ""}) for n in range(count)]


class Driver:
    """A driver over a fake application: what deployments/job.py does over handles."""

    def __init__(
        self,
        tmp_path,
        rows: Sequence[InputRow],
        *,
        sites: Sequence[str] = ("L1_block",),
        position: PositionLike = "last_prompt",
        limits: ShardLimits = FOUR_ROWS,
    ) -> None:
        self.store = open_store(tmp_path / "root")
        service = ExtractionLimits(shard=limits)
        self.app = Application(self.store, engine=FakeEngine(), limits=service)
        served = self.app.service.offer().description
        selection = select(served, layers=None, site="block", sites=sites, position=position)
        self.passes = 0
        self.rows = rows
        self.plan = SourcePlan(served, selection, self._read, "d", limits)
        self.tokenized: list[int] = []

    def _read(self):
        self.passes += 1
        return iter(self.rows)

    def _tokenize(self, rows, first_index):
        self.tokenized.append(first_index)
        identity = self.plan.selection.identity
        return self.app.service.tokenize(rows, identity, first_index)

    def run(self, progress=None):
        spec = spec_of(self.plan)
        backend = LocalBackend(self.app.engine, self.store)
        job = Job(
            spec=spec,
            shards=lambda done: read_shards(self.plan.rows, spec, self._tokenize, done),
            rows_of=NamedRows(self.plan, spec),
            capture=capturer(backend, self.plan.selection),
            stage=backend.stage,
            commit=backend.commit,
            isolates=True,
            options=RunOptions(batch_size=3),
        )
        return asyncio.run(run_job(self.store, job, progress))


@pytest.mark.requirement("L-5", "S-4", "D-3")
def test_a_job_over_rows_that_are_read_twice_makes_the_dataset_that_a_request_makes(tmp_path):
    driver = Driver(tmp_path, rows_of(10))
    outcome = driver.run()
    assert driver.passes == 2
    assert driver.tokenized == [0, 4, 8]
    dataset = load_dataset(driver.store, "d", verify="full")
    assert dataset.row_ids == [f"r{n}" for n in range(10) if n != 3]
    assert outcome.manifest.content_sha256 == dataset.manifest.content_sha256
    ran = driver.app.engine.tasks
    again = driver.run()
    assert (again.resumed, again.manifest) == (3, outcome.manifest)
    assert driver.app.engine.tasks == ran


def test_the_collector_rests_while_a_shard_is_read_and_not_longer(tmp_path):
    driver = Driver(tmp_path, rows_of(10))
    spec = spec_of(driver.plan)
    was_on = []

    def tokenize(rows, first_index):
        was_on.append(gc.isenabled())
        return driver._tokenize(rows, first_index)

    was_on += (gc.isenabled() for _ in read_shards(driver.plan.rows, spec, tokenize))
    assert was_on == [False, True] * 3


UNEVEN = ("embed", "L1_attn_out_prelinear", "L3_attn_out_prelinear")  # 8, 12 and 16 wide


@pytest.mark.requirement("D-3", "D-8", "C-8", "S-4")
@pytest.mark.parametrize("position", ["all_prompt", "mean_prompt", {"index": [0, -1]}])
def test_ragged_rows_fall_into_the_same_shards_for_a_job_and_for_a_request(tmp_path, position):
    """The job's first pass knows no tokens; the request knows them all, and which rows failed."""
    rows = [InputRow(f"r{n}", {"prompt": "x" * (n * 7 % 40)}) for n in range(12)]
    limits = ShardLimits(max_rows=5, max_bytes=4 * (8 + 12 + 16) * 90)
    driver = Driver(tmp_path, rows, sites=UNEVEN, position=position, limits=limits)
    manifest = driver.run().manifest
    request = ActivationRequest(
        model=MODEL,
        rows=[{"id": row.id, **row.content} for row in rows],
        sites=list(UNEVEN),
        position=position,
        persistence="dataset",
        dataset_id="requested",
    )
    asyncio.run(driver.app.service.extract_dataset(request))
    dataset = load_dataset(driver.store, "requested", verify="full")
    assert dataset.manifest.content_sha256 == manifest.content_sha256
    assert dataset.manifest.shard_layout == "per_site"
    shards = [shard.rows for shard in manifest.shards]
    assert max(shards) <= 5
    if position == "all_prompt":
        assert max(shards) < 5, "no shard was cut for its bytes"
        sizes = [sum(e.bytes - 128 for e in one.features_files) for one in manifest.shards]
        assert max(sizes) <= limits.max_bytes
    good = [row for row in rows if row.content["prompt"]]
    assert dataset.row_ids == [row.id for row in good]
    for site, name in enumerate(UNEVEN):
        expected = [_site_of(row, site, position) for row in good]
        assert np.array_equal(dataset.site(name), np.concatenate(expected))


def _site_of(row: InputRow, site: int, position: PositionLike) -> NDArray[np.float32]:
    """[feature rows, width]: what the fake model computes."""
    ids = np.array(list(row.content["prompt"].encode()), np.int32)
    sites = [parse_site(name) for name in UNEVEN]
    ends = np.cumsum([8, 12, 16])
    columns = slice(ends[site] - (8, 12, 16)[site], ends[site])
    return fake_features(ids, sites, canonical_position(position))[:, columns]


@pytest.mark.requirement("D-4")
def test_shards_that_another_run_wrote_with_other_numbers_are_counted_and_told(
    tmp_path, monkeypatch, caplog
):
    """Two jobs for one dataset at once: the first receipt of each shard counts."""
    monkeypatch.setattr("tests.fakes.stage_shard", rivalled(fakes.stage_shard, {0, 2}))
    driver = Driver(tmp_path, rows_of(10))
    outcome = driver.run()
    assert (outcome.superseded, outcome.resumed, len(outcome.receipts)) == ([0, 2], 0, 3)
    features = load_dataset(driver.store, "d", verify="full").features
    expected = np.concatenate([
        fake_features(np.array(list(f"prompt {n}".encode()), np.int32), [parse_site("L1_block")])
        for n in range(10)
        if n != 3
    ])  # fmt: skip
    assert np.array_equal(features[:3], expected[:3] + 1)
    assert np.array_equal(features[3:7], expected[3:7])
    (told,) = caplog.messages
    assert told.startswith("dataset d: each of the shards 0, 2 stood already when")
    assert "what this run captured of it is not in the dataset" in told


@pytest.mark.requirement("D-4")
def test_shards_that_another_run_wrote_with_the_same_numbers_are_nothing_to_tell(
    tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("tests.fakes.stage_shard", rivalled(fakes.stage_shard, ()))
    outcome = Driver(tmp_path, rows_of(10)).run()
    assert outcome.superseded == []
    assert not caplog.messages


@pytest.mark.requirement("D-4")
def test_other_numbers_are_told_also_where_the_run_fails_afterwards(tmp_path, monkeypatch, caplog):
    first_differs = rivalled(fakes.stage_shard, {0})
    first_is_staged = threading.Event()

    def stage(store, spec, shard, *rest):
        if shard:
            first_is_staged.wait(timeout=10)
            time.sleep(0.1)
            raise StorageError("disk full")
        try:
            return first_differs(store, spec, shard, *rest)
        finally:
            first_is_staged.set()

    monkeypatch.setattr("tests.fakes.stage_shard", stage)
    with pytest.raises(StorageError):
        Driver(tmp_path, rows_of(10)).run()
    (told,) = caplog.messages
    assert told.startswith("dataset d: shard 0 stood already when")


@pytest.mark.requirement("D-5", "D-8")
def test_a_job_of_ragged_rows_resumes_shard_by_shard(tmp_path):
    rows = [InputRow(f"r{n}", {"prompt": "x" * (n * 7 % 40)}) for n in range(12)]
    limits = ShardLimits(max_rows=5, max_bytes=4 * (8 + 12 + 16) * 90)
    driver = Driver(tmp_path, rows, sites=UNEVEN, position="all_prompt", limits=limits)
    whole = driver.run()
    folder = tmp_path / "root/datasets/d"
    (folder / "manifest.json").unlink()
    (folder / "shard-00002.receipt.json").unlink()
    driver.tokenized.clear()
    again = driver.run()
    assert driver.tokenized == [whole.spec.shards[2].first_row]
    assert again.resumed == len(whole.spec.shards) - 1
    assert again.manifest.content_sha256 == whole.manifest.content_sha256


@pytest.mark.requirement("D-5")
def test_a_request_captures_only_the_shards_without_receipt(tmp_path):
    driver = Driver(tmp_path, rows_of(10))
    request = ActivationRequest(
        model=MODEL,
        rows=[{"id": row.id, **row.content} for row in driver.rows],
        layers=[1],
        persistence="dataset",
        dataset_id="d",
    )
    first = asyncio.run(driver.app.service.extract_dataset(request))
    folder = tmp_path / "root/datasets/d"
    (folder / "manifest.json").unlink()
    (folder / "shard-00001.receipt.json").unlink()
    driver.app.engine.captured.clear()
    again = asyncio.run(driver.app.service.extract_dataset(request))
    prompts = [bytes(ids).decode() for ids in driver.app.engine.captured]
    assert prompts == [f"prompt {n}" for n in (4, 5, 6, 7)]
    assert again.dataset.content_sha256 == first.dataset.content_sha256


@pytest.mark.requirement("L-5", "D-5")
def test_only_shards_without_receipt_are_tokenized_again(tmp_path):
    driver = Driver(tmp_path, rows_of(10))
    driver.run()
    folder = tmp_path / "root/datasets/d"
    (folder / "manifest.json").unlink()
    (folder / "shard-00001.receipt.json").unlink()
    driver.tokenized.clear()
    assert driver.run().resumed == 2
    assert driver.tokenized == [4]


@pytest.mark.requirement("L-5", "L-6")
def test_another_input_under_the_same_id_names_the_rows(tmp_path):
    driver = Driver(tmp_path, rows_of(10))
    driver.run()
    driver.rows = driver.rows[:3]
    with pytest.raises(ConflictError, match="cannot change") as caught:
        driver.run()
    assert caught.value.details["rows"][-1] == "r9"


@pytest.mark.requirement("L-5", "D-7")
def test_an_application_that_serves_another_model_by_now_is_refused(tmp_path):
    driver = Driver(tmp_path, rows_of(10))
    model = fake_description().model.model_copy(update={"revision": "sha256:" + "7" * 64})
    driver.app.service.description = fake_description(model=model)
    with pytest.raises(ConflictError, match="now serves sha256:777") as caught:
        driver.run()
    assert caught.value.code == "mixed_fingerprints"


# --- progress -------------------------------------------------------------------------------------


@pytest.mark.requirement("L-5", "U-4")
def test_progress_counts_rows_once_and_says_rate_and_time_left(tmp_path):
    now = [0.0]
    lines = []

    class Lines(ProgressLines):
        def captured(self, chunk):
            super().captured(chunk)
            super().captured(chunk)  # as where rows are retried
            now[0] += 1.0
            lines.append(self.line())

    driver = Driver(tmp_path, rows_of(200))
    progress = Lines(clock=lambda: now[0])
    assert progress.line() == "reading the input"
    driver.run(progress)
    assert progress.line().startswith("200/200 rows, 1 failed, ")
    assert progress.line().endswith(" rows/s, 0:00 left")
    assert all(0 < int(line.partition("/")[0]) <= 200 for line in lines)
    resumed = ProgressLines(clock=lambda: now[0])
    driver.run(resumed)
    assert resumed.line() == "200/200 rows, 1 failed, 0.0 rows/s, 0:00 left"


def test_time_left_is_readable():
    progress = ProgressLines(clock=iter([0.0, 10.0]).__next__)
    progress.total, progress._done = 40_000, {0: 100}
    assert progress.line() == "100/40000 rows, 0 failed, 10.0 rows/s, 1:06:30 left"
    progress = ProgressLines(clock=iter([0.0, 1.0]).__next__)
    progress.total, progress._done = 1, {0: 1}
    assert progress.line() == "1/1 row, 0 failed, 1.0 rows/s, 0:00 left"

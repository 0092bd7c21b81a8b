"""One job, whoever runs it."""

import asyncio
from collections.abc import Sequence

import pytest

from tests.fakes import Application, FakeEngine, LocalBackend, fake_description
from wllm_ray.dataset.reader import load_dataset
from wllm_ray.dataset.store import open_store
from wllm_ray.errors import ConflictError
from wllm_ray.extraction import capturer
from wllm_ray.job.progress import ProgressLines
from wllm_ray.job.run import Job, RunOptions, run_job
from wllm_ray.job.source import NamedRows, SourcePlan, read_shards, spec_of
from wllm_ray.plan import ShardLimits
from wllm_ray.records import InputRow
from wllm_ray.requests import select


def rows_of(count: int) -> list[InputRow]:
    return [InputRow(f"r{n}", {"prompt": f"prompt {n}" if n != 3 else ""}) for n in range(count)]


class Driver:
    """A driver over a fake application: what deployments/job.py does over handles."""

    def __init__(self, tmp_path, rows: Sequence[InputRow], **engine) -> None:
        self.store = open_store(tmp_path / "root")
        self.app = Application(self.store, engine=FakeEngine(**engine))
        served = self.app.service.offer().description
        selection = select(served, layers=[1], site="block", sites=None, position="last_prompt")
        self.passes = 0
        self.rows = rows
        self.plan = SourcePlan(served, selection, self._read, "d", ShardLimits(max_rows=4))
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
            capture=capturer(backend, self.plan.selection.sites, "last_prompt"),
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

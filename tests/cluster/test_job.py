"""Ray jobs, submitted by the documented command, on a cluster that wants a token."""

import json
import secrets
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from tests.cluster.conftest import (
    BIN,
    ROOT,
    Application,
    cluster_env,
    free_port,
    running_application,
    running_cluster,
)
from tests.servers import stores
from wllm_ray import load_dataset
from wllm_ray.dataset.stores.store import open_store

DEADLINE_S = 120


@dataclass(frozen=True)
class JobServer:
    """A running application, and the job server of its cluster."""

    application: Application
    dashboard: str

    def submit(self, path: Path | str, *options: str, submit: tuple[str, ...] = ()):
        """The command of deployments/README.md."""
        command = [
            str(BIN / "ray"), "job", "submit", "--address", self.dashboard, *submit,
            "--working-dir", ".", "--",
            "python", "-m", "deployments.job", str(path), "--layer", "0,2", *options,
        ]  # fmt: skip
        return self.run(command)

    def run(self, command: list[str]):
        return subprocess.run(
            command,
            cwd=ROOT,
            env=self.application.env,
            capture_output=True,
            text=True,
            check=False,
            timeout=DEADLINE_S,
        )

    def start(self, path: Path | str, *options: str) -> subprocess.Popen:
        """The driver alone, without a job around it."""
        return subprocess.Popen(
            [sys.executable, "-m", "deployments.job", str(path), "--layer", "0,2", *options],
            cwd=ROOT,
            env=self.application.env | {"RAY_ADDRESS": self.application.ray_address},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def details(self, submission_id: str) -> dict:
        token = self.application.env["RAY_AUTH_TOKEN"]
        answer = httpx.get(
            f"{self.dashboard}/api/jobs/{submission_id}",
            headers={"Authorization": f"Bearer {token}"},
            timeout=30,
        )
        return answer.raise_for_status().json()

    def by_http(self, rows: list[dict], dataset_id: str, **fields) -> dict:
        """The same dataset by HTTP: its reference."""
        body = {"model": "tiny", "rows": rows, "layers": [0, 2], "persistence": "dataset"}
        answer = httpx.post(
            f"{self.application.base_url}/v1/activation-datasets",
            json=body | {"dataset_id": dataset_id} | fields,
            timeout=DEADLINE_S,
        )
        assert answer.status_code == 200, answer.text
        return answer.json()["dataset"]

    def files(self, dataset_id: str) -> dict[str, int]:
        folders = (f"datasets/{dataset_id}", f"runs/{dataset_id}")
        paths = (path for one in folders for path in (self.application.root / one).iterdir())
        return {str(path): path.stat().st_mtime_ns for path in paths}


@pytest.fixture(scope="module")
def object_store(tmp_path_factory):
    """The environment that leads to an S3 server; the cluster's processes and this one have it."""
    with stores.moto(tmp_path_factory.mktemp("moto")) as env, pytest.MonkeyPatch.context() as patch:
        for name, value in env.items():
            patch.setenv(name, value)
        yield env


@pytest.fixture(scope="module")
def jobs(tmp_path_factory, object_store):
    home = tmp_path_factory.mktemp("jobs")
    env = cluster_env(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=secrets.token_hex(16), **object_store)
    dashboard = free_port()
    ports = [
        f"--dashboard-port={dashboard}",
        *(
            f"--{name}-port={free_port()}"
            for name in ("dashboard-agent-listen", "dashboard-agent-grpc", "metrics-export")
        ),
    ]
    with (
        running_cluster(env, "--include-dashboard=true", *ports) as address,
        running_application(home, address, env) as application,
    ):
        yield JobServer(application, f"http://127.0.0.1:{dashboard}")


def prompts(count: int) -> list[dict]:
    return [
        {"id": f"row-{n}", "prompt": f"the cat sat on mat {n}", "metadata": {"n": n}}
        for n in range(count)
    ]


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def last_json(text: str) -> dict:
    """The last line that is an object: Ray's client adds lines of its own after it."""
    return json.loads([line for line in text.splitlines() if line.startswith("{")][-1])


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)
    return found


@pytest.mark.requirement("L-5", "S-4", "D-3")
def test_a_submitted_job_makes_the_dataset_that_http_makes_and_finds_it_done(jobs, tmp_path):
    rows = prompts(20)
    path = write_rows(tmp_path / "rows.jsonl", rows)
    options = ("--dataset-id", "by-job", "--batch-size", "3", "--rows-per-shard", "8")
    first = jobs.submit(path, *options)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "20/20 rows, 0 failed, " in first.stdout + first.stderr
    summary = last_json(first.stdout)
    assert (summary["status"], summary["exit_code"], summary["shards_resumed"]) == (
        "committed", 0, 0,
    )  # fmt: skip
    assert (summary["shards_written"], summary["shards_superseded"]) == (3, 0)
    reference = jobs.by_http(rows, "by-http", rows_per_shard=8)
    assert summary["content_sha256"] == reference["content_sha256"]
    dataset = load_dataset(jobs.application.root, "by-job", verify="full")
    assert dataset.row_ids == [row["id"] for row in rows]
    assert dataset.metadata[7] == {"n": 7}
    before = jobs.files("by-job")
    again = jobs.submit(path, *options)
    assert again.returncode == 0, again.stdout + again.stderr
    assert last_json(again.stdout)["shards_resumed"] == 3
    assert jobs.files("by-job") == before
    assert "the cat sat" not in first.stdout + first.stderr + again.stdout + again.stderr


@pytest.mark.requirement("L-5", "D-10")
def test_a_row_that_cannot_run_makes_the_driver_exit_with_one(jobs, tmp_path):
    rows = [*prompts(3), {"id": "long", "token_ids": [5] * 257}]
    path = write_rows(tmp_path / "rows.jsonl", rows)
    stored = ("--shard-format", "arrow", "--storage-dtype", "float16", "--full-trace")
    options = ("--dataset-id", "one-fails", *stored)
    done = jobs.submit(path, *options, submit=("--submission-id", "one-fails"))
    assert done.returncode == 1
    assert jobs.details("one-fails")["driver_exit_code"] == 1
    summary = last_json(done.stdout)
    assert (summary["exit_code"], summary["failures_by_code"]) == (1, {"too_long": 1})
    dataset = load_dataset(jobs.application.root, "one-fails", verify="full")
    assert dataset.row_ids == ["row-0", "row-1", "row-2"]
    assert (dataset.manifest.shard_format, dataset.manifest.dtype) == ("arrow", "float16")
    assert len(dataset.trace("row-1").sites) > 1


@pytest.mark.requirement("L-5", "R-3", "D-1", "D-3", "D-5")
def test_a_driver_that_is_killed_or_stopped_is_finished_by_a_resubmission(jobs):
    """Input and dataset lie in an object store, and the dataset is the one that a disk holds."""
    rows = prompts(200)
    root = f"s3://{stores.BUCKET}/jobs"
    path = f"{root}/input/rows.jsonl"
    store = open_store(root)
    store.put("input/rows.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    options = ("--dataset-id", "killed", "--batch-size", "1", "--rows-per-shard", "2")
    options += ("--storage", root)

    def receipts() -> int:
        return sum("receipt" in key for key, _ in store.list("datasets/killed"))

    jobs.submit(path, *options, submit=("--submission-id", "killed", "--no-wait"))
    until(lambda: receipts() >= 5)
    driver_of("killed").kill()
    until(lambda: jobs.details("killed")["status"] == "FAILED")
    killed_at = receipts()
    assert killed_at < 100

    driver = jobs.start(path, *options)
    until(lambda: receipts() >= killed_at + 5)
    driver.send_signal(signal.SIGTERM)
    _, stderr = driver.communicate(timeout=30)
    assert driver.returncode == 143
    assert "submitting it again goes on from there" in stderr
    stopped_at = receipts()
    assert stopped_at < 100

    finished = jobs.start(path, *options)
    stdout, stderr = finished.communicate(timeout=DEADLINE_S)
    assert finished.returncode == 0, stderr
    summary = json.loads(stdout)
    assert 100 > summary["shards_resumed"] >= stopped_at
    reference = jobs.by_http(rows, "not-killed", rows_per_shard=2)
    assert summary["content_sha256"] == reference["content_sha256"]
    here, there = load_dataset(jobs.application.root, "not-killed"), load_dataset(root, "killed")
    assert np.array_equal(here.features_3d, there.features_3d)
    verified = jobs.run([str(BIN / "wllm"), "verify", root, "killed"])
    assert verified.returncode == 0, verified.stdout + verified.stderr


def driver_of(dataset_id: str) -> psutil.Process:
    """The driver itself, not the shell around it."""
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if command[1:3] == ["-m", "deployments.job"] and dataset_id in command:
            return process
    raise AssertionError("no driver runs")


@pytest.mark.requirement("L-5")
def test_an_application_that_is_not_there_or_does_not_start_is_told(jobs, tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", prompts(1))
    script = """
        import ray
        from ray import serve

        @serve.deployment(ray_actor_options={"num_cpus": 1000})
        class Stuck:
            pass

        @serve.deployment(max_constructor_retry_count=1, ray_actor_options={"num_cpus": 0})
        class Broken:
            def __init__(self):
                raise ValueError("no such model")

        ray.init(address="auto", log_to_driver=False)
        targets = [
            serve.RunTarget(Stuck.bind(), name="stuck", route_prefix="/stuck"),
            serve.RunTarget(Broken.bind(), name="broken", route_prefix="/broken"),
        ]
        serve.run_many(targets, wait_for_applications_running=False)
    """
    deployed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        env=jobs.application.env | {"RAY_ADDRESS": jobs.application.ray_address},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert deployed.returncode == 0, deployed.stderr
    wanted = {
        "absent": ("application_not_found", "(applications: broken, stuck, wllm)"),
        "stuck": ("not_ready", "it is DEPLOYING (Stuck UPDATING, replicas "),
        "broken": ("deploy_failed", "no such model"),
    }
    patience = {"absent": "60", "stuck": "1", "broken": "60"}
    drivers = {app: jobs.start(path, "--app", app, "--timeout", patience[app]) for app in wanted}
    for app, (code, words) in wanted.items():
        stdout, stderr = drivers[app].communicate(timeout=DEADLINE_S)
        assert drivers[app].returncode == 2, stderr
        assert json.loads(stdout)["error"]["code"] == code
        assert words in stderr


@pytest.mark.requirement("L-5", "L-6")
def test_a_malformed_input_is_refused_before_the_cluster_is_touched(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id":"a","prompt":"SECRET"}\nnope\n{"id":"a","prompt":"x"}\n')
    nobody = cluster_env(RAY_ADDRESS="127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "deployments.job", str(path), "--layer", "0"],
        cwd=ROOT,
        env=nobody,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["code"] == "invalid_rows"
    assert "line 2: not JSON" in done.stderr
    assert "line 3: `id` was used before, on line 1" in done.stderr
    assert "SECRET" not in done.stdout + done.stderr

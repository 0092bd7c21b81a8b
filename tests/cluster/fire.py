"""What the tests under fire share: applications with one and two replicas, jobs, and real kills."""

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import torch
import yaml
from tiny_models import build_tiny_model

from tests.cluster.conftest import BIN, ROOT, cluster_env, free_port, serve_config

MAX_LEN = 640
ROWS_PER_SHARD = 25
DEADLINE_S = 1200


def write_rows(path: Path, *, count: int, longest: int, vocabulary: int, seed: int = 0) -> Path:
    """Rows of 5 tokens to ``longest``, as ids, so that no tokenizer has a part in it."""
    random_ids = np.random.default_rng(seed)
    with path.open("w") as file:
        for index in range(count):
            length = int(random_ids.integers(5, longest + 1))
            ids = random_ids.integers(3, vocabulary, length).tolist()
            row = {"id": f"r{index}", "token_ids": ids, "metadata": {"tokens": length}}
            file.write(json.dumps(row) + "\n")
    return path


def tiny_model(home: Path, family: str, dtype: torch.dtype) -> Path:
    """A tiny random model that takes rows of :data:`MAX_LEN` tokens."""
    path = build_tiny_model(family, home / "model", dtype)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": MAX_LEN}))
    return path


@dataclass(frozen=True)
class Fire:
    """Two applications of one model, ``one`` and ``two`` replicas, and jobs on them."""

    address: str
    home: Path
    rows: Path

    def start(self, app: str, dataset_id: str, batch_size: int, **env: str) -> subprocess.Popen:
        """Start a job driver, the documented one."""
        command = [
            sys.executable, "-m", env.pop("module", "deployments.job"), str(self.rows),
            "--app", app, "--layer", "0,2", "--dataset-id", dataset_id,
            "--storage", str(self.home / "root"), "--batch-size", str(batch_size),
            "--rows-per-shard", str(ROWS_PER_SHARD), "--timeout", "120",
        ]  # fmt: skip
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=cluster_env(RAY_ADDRESS=self.address, **env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, driver: subprocess.Popen) -> dict:
        """Wait for a driver; its summary."""
        stdout, stderr = driver.communicate(timeout=DEADLINE_S)
        assert driver.returncode == 0, stdout[-2000:] + stderr[-4000:]
        return json.loads(stdout.splitlines()[-1])

    def digest(self, app: str, dataset_id: str, batch_size: int, **env: str) -> str:
        """Run a job; the content digest of its dataset."""
        return self.finish(self.start(app, dataset_id, batch_size, **env))["content_sha256"]

    def receipts(self, dataset_id: str) -> int:
        folder = self.home / "root" / "datasets" / dataset_id
        return len(list(folder.glob("*.receipt.json")))

    def until_receipts(self, dataset_id: str, count: int, driver: subprocess.Popen) -> None:
        """Wait until a job has staged so many shards, while its driver lives."""
        deadline = time.monotonic() + DEADLINE_S
        while self.receipts(dataset_id) < count:
            assert driver.poll() is None, driver.stderr.read()[-4000:]
            assert time.monotonic() < deadline, f"{dataset_id} did not stage {count} shards"
            time.sleep(0.01)


def processes(title: str) -> list[psutil.Process]:
    """Processes of this test's clusters whose title begins so."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            command = process.cmdline()
        except psutil.Error:
            continue
        if command and command[0].startswith(title):
            found.append(process)
    return found


def kill_one(title: str, chance: random.Random | None = None) -> bool:
    """SIGKILL one process with such a title; False where there is none."""
    found = processes(title)
    if not found:
        return False
    (chance or random).choice(found).kill()
    return True


def replica(app: str) -> str:
    """Title of an activation replica's process."""
    return f"ray::ServeReplica:{app}:ActivationReplica"


@dataclass(frozen=True)
class App:
    """An application: its name, how many replicas it has, what builds it, and its own arguments."""

    name: str
    replicas: int
    import_path: str = "deployments.app:build_app"
    args: dict[str, object] = field(default_factory=dict)


ONE_AND_TWO = (App("one", 1), App("two", 2))


@contextmanager
def applications(
    home: Path, address: str, apps: Sequence[App] = ONE_AND_TWO, **args: object
) -> Iterator[Callable[[str], str]]:
    """``serve run`` with some applications, once all are ready; yields name → base URL."""
    config = serve_config()
    (base,) = config["applications"]
    config["http_options"]["port"] = free_port()
    config["applications"] = [
        base
        | {
            "name": app.name,
            "route_prefix": f"/{app.name}",
            "import_path": app.import_path,
            "args": base["args"] | {"num_gpus": 0, "num_cpus": 0, **args, **app.args},
            "deployments": [{"name": "ActivationReplica", "num_replicas": app.replicas}],
        }
        for app in apps
    ]

    def url(name: str) -> str:
        return f"http://127.0.0.1:{config['http_options']['port']}/{name}"

    path = home / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config))
    with (home / "serve.log").open("wb") as sink:
        server = subprocess.Popen(
            [str(BIN / "serve"), "run", str(path), "--address", address],
            cwd=ROOT,
            env=cluster_env(),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        for app in apps:
            command = [
                str(BIN / "wllm"), "wait-ready", "--base-url", url(app.name), "--timeout", "240",
            ]  # fmt: skip
            ready = subprocess.run(command, env=cluster_env(), capture_output=True, check=False)
            assert ready.returncode == 0, (home / "serve.log").read_text()[-4000:]
        yield url
    finally:
        server.terminate()
        server.wait(60)
        # The applications outlive the command that deployed them, and the next test deploys anew.
        subprocess.run(
            [sys.executable, "-c", SHUTDOWN],
            env=cluster_env(RAY_ADDRESS=address),
            check=True,
            timeout=DEADLINE_S,
        )


SHUTDOWN = """
import ray
from ray import serve
ray.init(address="auto", log_to_driver=False)
serve.shutdown()
"""


def here(module: str) -> str:
    """Dotted name of a module of this folder, for processes that import it by name."""
    assert (Path(__file__).parent / f"{module}.py").exists()
    return f"tests.cluster.{module}"


def marks(home: Path, name: str) -> str:
    """A fresh folder in which faults note that they have happened."""
    folder = home / f"marks-{name}"
    folder.mkdir()
    return str(folder)

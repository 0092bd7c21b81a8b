"""A real application on a real Ray cluster, started by the command that users type."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from tiny_models import build_tiny_model

ROOT = Path(__file__).resolve().parent.parent.parent
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cluster_env(**changes: str) -> dict[str, str]:
    """The environment of every process that joins a test cluster; keyword arguments replace.

    Left to itself, token authentication would write into the home directory of whoever runs the
    tests.
    """
    return (
        os.environ
        | {
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
        }
        | changes
    )


@dataclass(frozen=True)
class Application:
    base_url: str
    ray_address: str
    root: Path
    model: Path
    served: str
    log: Path
    env: dict[str, str] = field(default_factory=cluster_env)


@contextmanager
def running_cluster(env: dict[str, str], *options: str) -> Iterator[str]:
    """A cluster of its own, whose ports nobody else uses, ended by its own process group."""
    port = free_port()
    command = [
        str(BIN / "ray"), "start", "--head", "--block", f"--port={port}", "--num-cpus=4",
        "--node-ip-address=127.0.0.1", "--disable-usage-stats",
        f"--object-store-memory={1 << 29}", *options,
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield f"127.0.0.1:{port}"
    finally:
        _end(process, signal.SIGTERM)


def _end(process: subprocess.Popen, ask: signal.Signals) -> None:
    """Ask a process to go; end its group where it stays."""
    process.send_signal(ask)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(60)


@pytest.fixture(scope="session")
def ray_address():
    with running_cluster(cluster_env(), "--include-dashboard=false") as address:
        yield address


@pytest.fixture(scope="module")
def own_cluster():
    """A cluster for one module: Serve keeps the port with which it was started first."""
    with running_cluster(cluster_env(), "--include-dashboard=false") as address:
        yield address


def serve_config() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "serve_config.yaml").read_text())


def write_config(path: Path, *, port: int, **args: object) -> None:
    config = serve_config()
    config["http_options"]["port"] = port
    application = config["applications"][0]
    application["args"] |= args
    path.write_text(yaml.safe_dump(config))


@contextmanager
def running_application(
    home: Path, ray_address: str, env: dict[str, str], **args: object
) -> Iterator[Application]:
    """`serve run serve_config.yaml`, with a tiny model and another port, once it is ready."""
    model = build_tiny_model("qwen3", home / "tiny-qwen3")
    root, port, log = home / "root", free_port(), home / "serve.log"
    write_config(
        home / "serve_config.yaml",
        port=port,
        model=str(model),
        served_model_name="tiny",
        max_model_len=256,
        prefill_split_tokens=64,
        storage_root=str(root),
        num_gpus=0,
        **args,
    )
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [str(BIN / "serve"), "run", str(home / "serve_config.yaml"), "--address", ray_address],
            cwd=ROOT,
            env=env,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    base_url = f"http://127.0.0.1:{port}"
    try:
        ready = subprocess.run(
            [str(BIN / "wllm"), "wait-ready", "--base-url", base_url, "--timeout", "240"],
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ready.returncode == 0, ready.stderr + log.read_text()[-4000:]
        yield Application(base_url, ray_address, root, model, "tiny", log, env)
    finally:
        _end(process, signal.SIGINT)


@pytest.fixture(scope="session")
def application(ray_address, tmp_path_factory):
    home = tmp_path_factory.mktemp("application")
    with running_application(home, ray_address, cluster_env()) as running:
        yield running

"""A real application on a real Ray cluster, started by the command that users type."""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.engine.tiny_models import build_tiny_model

ROOT = Path(__file__).resolve().parent.parent.parent
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cluster_env() -> dict[str, str]:
    """The environment of every process that joins the test cluster.

    Token authentication would write into the home directory of whoever runs the tests.
    """
    return os.environ | {
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }


@dataclass(frozen=True)
class Application:
    base_url: str
    ray_address: str
    root: Path
    model: Path
    served: str
    log: Path


@pytest.fixture(scope="session")
def ray_address():
    """A cluster of its own, whose ports nobody else uses, ended by its own process group."""
    port = free_port()
    command = [
        str(BIN / "ray"), "start", "--head", "--block", f"--port={port}", "--num-cpus=4",
        "--include-dashboard=false", "--node-ip-address=127.0.0.1", "--disable-usage-stats",
        f"--object-store-memory={1 << 29}",
    ]  # fmt: skip
    process = subprocess.Popen(
        command,
        env=cluster_env(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    yield f"127.0.0.1:{port}"
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(30)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)


def write_config(path: Path, *, port: int, **args: object) -> None:
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = port
    application = config["applications"][0]
    application["args"] |= args
    path.write_text(yaml.safe_dump(config))


@pytest.fixture(scope="session")
def application(ray_address, tmp_path_factory):
    """`serve run serve_config.yaml`, with a tiny model and another port, until it is ready."""
    home = tmp_path_factory.mktemp("application")
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
    )
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [str(BIN / "serve"), "run", str(home / "serve_config.yaml"), "--address", ray_address],
            cwd=ROOT,
            env=cluster_env(),
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    base_url = f"http://127.0.0.1:{port}"
    ready = subprocess.run(
        [str(BIN / "wllm"), "wait-ready", "--base-url", base_url, "--timeout", "240"],
        env=cluster_env(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ready.returncode == 0, ready.stderr + log.read_text()[-4000:]
    yield Application(base_url, ray_address, root, model, "tiny", log)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)

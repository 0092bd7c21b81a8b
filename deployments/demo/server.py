"""Start the application as a child of the demo, on a Ray cluster of its own, and end both."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

__all__ = ["base_url", "render_config", "run_client", "running_server"]

_PR_SET_PDEATHSIG = 1


def render_config(
    source: Path,
    target: Path,
    *,
    model: str,
    served_model_name: str,
    longest_row: Callable[[int], int],
) -> int:
    """Write ``source`` with this model and a port that is free; returns the port.

    Args:
        source: The configuration that is shipped.
        target: Where the demo's own goes.
        model: A folder, or a name on the hub.
        served_model_name: What it is called.
        longest_row: The shipped ``max_model_len`` → the one for this model.
    """
    config: dict[str, Any] = yaml.safe_load(source.read_text())
    args = config["applications"][0]["args"]
    args["model"] = model
    args["served_model_name"] = served_model_name
    args["max_model_len"] = longest_row(args["max_model_len"])
    port = _free_port(int(config["http_options"]["port"]))
    config["http_options"]["port"] = port
    target.write_text(yaml.safe_dump(config, sort_keys=False))
    return port


def base_url(port: int) -> str:
    """Where the application answers."""
    return f"http://127.0.0.1:{port}"


def _free_port(wanted: int) -> int:
    """The wanted port, or another one where something else listens there."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            # As servers do, so that a port whose last connections are closing counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError("no free port on 127.0.0.1")


@contextmanager
def running_server(config: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``serve run config`` for as long as the block lasts; its output goes to ``log``."""
    serve = [sys.executable, "-m", "ray.serve.scripts", "run", str(config)]
    with log.open("wb") as output:
        guard = subprocess.Popen(  # noqa: S603 (our own interpreter, no shell)
            [sys.executable, "-m", "deployments.demo.guard", *serve],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(),
            # Ctrl-C is for the demo, which then ends the application in its own time.
            start_new_session=True,
        )
    with guard:
        # Leaving closes the guard's standard input, which ends the application, and waits.
        yield guard


def run_client(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start a command that ends when the demo does, however that comes."""
    return subprocess.Popen(  # noqa: S603 (our own interpreter, no shell)
        command,
        env=_client_environment(),
        preexec_fn=_die_with_parent,  # noqa: PLW1509 (no other thread runs here)
    )


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _client_environment() -> dict[str, str]:
    """Ours, without what belongs to other servers: an API key, and the cluster to join."""
    ours = {name: value for name, value in os.environ.items() if name != "WLLM_API_KEY"}
    return ours | {"RAY_ADDRESS": "local"}


def _environment() -> dict[str, str]:
    """A cluster of its own, closed to other users of this machine, and quiet.

    Ray's ports on the loopback interface run code for whoever connects, so they ask for a token
    that only this process and its children know. Left to itself, Ray would put one into the home
    directory.
    """
    return _client_environment() | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }

"""Whether the Ray cluster that a command would join is still there.

Ray writes down the address of the cluster that was started last. A machine that crashed leaves it
there, and `serve run` then waits for that cluster for ever.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

__all__ = ["gone_cluster"]

_CONNECT_S = 2.0


def gone_cluster(environment: Mapping[str, str]) -> str | None:
    """Say that Ray would join a cluster which is gone, and what to do; None where it would not.

    Args:
        environment: ``RAY_ADDRESS`` names a cluster in place of Ray's file; ``RAY_TMPDIR`` and
            ``TMPDIR`` say where that file lies, as they do for Ray.
    """
    if environment.get("RAY_ADDRESS"):
        return None
    folder = environment.get("RAY_TMPDIR") or environment.get("TMPDIR") or "/tmp"  # noqa: S108 (Ray's)
    file = Path(folder) / "ray" / "ray_current_cluster"
    address = _address(file)
    if address is None or _answers(*address):
        return None
    host, port = address
    return (
        f"the Ray cluster at {host}:{port}, which {file} names, is gone, and `serve run` would "
        f"wait for it; start another with `RAY_ADDRESS=local serve run …` or `wllm serve`, or "
        f"remove the file (`ray stop` does, and ends every Ray process of yours on this machine)"
    )


def _address(file: Path) -> tuple[str, int] | None:
    try:
        host, _, port = file.read_text(encoding="utf-8").strip().rpartition(":")
        return host, int(port)
    except (OSError, ValueError):
        return None


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host.strip("[]"), port), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True

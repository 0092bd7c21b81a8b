"""Object-store servers as processes: loopback only, on a free port, and gone with the tests."""

from __future__ import annotations

import contextlib
import ctypes
import signal
import socket
import subprocess
import time

_STARTS_WITHIN_S = 60
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


@contextlib.contextmanager
def serving(command, folder, port):
    """Run a server until the block ends.

    Args:
        command: Its arguments.
        folder: Where it runs; its log is kept there.
        port: Where it is going to answer.
    """
    log = folder / "server.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 (it is one call, of a library loaded before)
        )
    try:
        _wait_for(process, port, log)
        yield
    finally:
        process.kill()
        process.wait()


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(process, port, log):
    deadline = time.monotonic() + _STARTS_WITHIN_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionError):
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-2000:]}")


def _die_with_parent():
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

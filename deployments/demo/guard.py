"""Run a command for as long as somebody holds our standard input open, then end all it started.

Ray ends its cluster when its driver is told to stop, but not every process of it, and not when it
is told while still starting. They all share the session that the command is started in, so that is
what is ended. Since a dying parent closes the pipe, this works after ``kill -9`` as well.

Run ``python -m deployments.demo.guard COMMAND ARGUMENT …`` with a pipe as standard input.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

__all__ = ["main"]

_STOP_SECONDS = 30
_POLL_SECONDS = 0.2


def main(command: list[str]) -> int:
    """Run the command; returns its exit status."""
    process = subprocess.Popen(  # noqa: S603 (the demo's own command, no shell)
        command, stdin=subprocess.DEVNULL, start_new_session=True
    )
    while process.poll() is None and not _input_closed():
        pass
    process.terminate()
    try:
        return process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    finally:
        for pid in _session(process.pid):
            os.kill(pid, signal.SIGKILL)


def _input_closed() -> bool:
    """Wait a moment for the end of standard input; nobody writes to it."""
    readable, _, _ = select.select([sys.stdin], [], [], _POLL_SECONDS)
    return bool(readable)


def _session(leader: int) -> Iterator[int]:
    """The processes of a session; its leader may be gone, the number is then still its own."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.getsid(int(entry.name)) == leader:
                yield int(entry.name)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

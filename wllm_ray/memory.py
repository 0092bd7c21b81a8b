"""How much memory there is and this process takes, and what is done about it."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["available_memory", "collector_paused", "release_unused", "resident_memory"]

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")


def available_memory() -> int | None:
    """Bytes that programs could still take, or None where that is not known.

    What a container may take counts as well, where it has a limit.
    """
    bounds = [found for found in (_machine(), _container()) if found is not None]
    return min(bounds, default=None)


def resident_memory() -> int:
    """Bytes of this process that lie in memory now; 0 where that is not known."""
    text = _read(_PROC / "self/statm")
    return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE") if text else 0


def release_unused() -> None:
    """Give memory back that this process has freed and the C library keeps; where it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _Pauses:
    """How many callers in how many threads want the collector to rest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._was_on = False

    def begin(self) -> None:
        with self._lock:
            if not self._count:
                self._was_on = gc.isenabled()
                gc.disable()
            self._count += 1

    def forget(self) -> None:
        """In a forked process, which has none of the threads that paused."""
        if self._count and self._was_on:
            gc.enable()
        self._lock, self._count = threading.Lock(), 0

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count and self._was_on:
                gc.enable()


_pauses = _Pauses()
os.register_at_fork(after_in_child=_pauses.forget)


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """While thousands of objects are made that all stay, do not look for garbage among them.

    Python looks each time that some hundreds more were made than freed, at the objects of all that
    is loaded every now and then, and finds none. In the whole process, so keep it short.
    """
    _pauses.begin()
    try:
        yield
    finally:
        _pauses.end()


def _machine() -> int | None:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read(_PROC / "meminfo"), re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _container() -> int | None:
    """Room up to the limit of the control group; cached files can be dropped and do not count."""
    limit, used = (_read(_CGROUP / name).strip() for name in ("memory.max", "memory.current"))
    if not (limit.isdigit() and used.isdigit()):
        return None
    cached = re.search(r"^inactive_file (\d+)$", _read(_CGROUP / "memory.stat"), re.MULTILINE)
    return max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

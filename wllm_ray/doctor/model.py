"""The model's files, and how much memory they will take."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wllm_ray.doctor.check import GIB, Check, Settings
from wllm_ray.doctor.machine import gpus
from wllm_ray.memory import available_memory

__all__ = ["check_model"]

BYTES_PER_VALUE = {"float32": 4, "bfloat16": 2, "float16": 2}
# Beside the weights: activations, key-value cache of a full pass, the libraries themselves.
MEMORY_MARGIN = 1.3

NEEDED_FILES = {
    "config.json": ("config.json",),
    "weights (*.safetensors)": ("*.safetensors",),
    "tokenizer": ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken"),
}


def check_model(settings: Settings) -> Iterator[Check]:
    """Whether the model's files are here and fit into memory."""
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
    missing = [what for what, patterns in NEEDED_FILES.items() if not _any_file(folder, patterns)]
    if missing:
        lack = (
            "rows of text cannot be tokenised without"
            if missing == ["tokenizer"]
            else "the model cannot be loaded without"
        )
        advice = f"{lack}; copy or download it again"
        yield Check("model files", "fail", f"{folder}: no {', no '.join(missing)}", advice)
    else:
        yield Check("model files", "ok", str(folder))
    yield _memory(folder, settings)


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
    found = gpus()
    room = int(found[0][1] * settings.gpu_memory_utilization) if found else available_memory()
    where = f"{settings.gpu_memory_utilization:.0%} of {found[0][0]}" if found else "free memory"
    if room is None:
        advice = "compare with what this machine has; /proc/meminfo could not be read"
        return Check("memory", "warn", f"needs about {needed / GIB:.1f} GiB per replica", advice)
    shown = f"needs about {needed / GIB:.1f} GiB per replica, {where} is {room / GIB:.1f} GiB"
    if needed > room:
        return Check("memory", "fail", shown, "take a smaller model or dtype, or a larger machine")
    return Check("memory", "ok", shown)


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

"""What a check says, and the settings that it looks at."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

__all__ = ["GIB", "Check", "Settings", "check_settings"]

GIB = 1024**3


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
    config: Path | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    self_test: bool = False


def check_settings(settings: Settings) -> Iterator[Check]:
    """Whether the application offers what the settings ask for."""
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

"""Reproducible, checksum-verified activation datasets from language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wllm_ray._version import __version__

if TYPE_CHECKING:
    from wllm_ray.dataset.reading.reader import ActivationDataset, load_dataset
    from wllm_ray.engines.transformers import TransformersEngine
    from wllm_ray.engines.vllm import VLLMEngine
    from wllm_ray.schema import StorageOptions

__all__ = [
    "ActivationDataset",
    "StorageOptions",
    "TransformersEngine",
    "VLLMEngine",
    "__version__",
    "load_dataset",
]

_MODULES = {
    "ActivationDataset": "wllm_ray.dataset.reading.reader",
    "StorageOptions": "wllm_ray.schema",
    "TransformersEngine": "wllm_ray.engines.transformers",
    "VLLMEngine": "wllm_ray.engines.vllm",
    "load_dataset": "wllm_ray.dataset.reading.reader",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for: ``import wllm_ray`` stays light."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The public names, imported or not."""
    return sorted(__all__)

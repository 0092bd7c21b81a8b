"""Reproducible, checksum-verified activation datasets from language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wllm_ray._version import __version__

if TYPE_CHECKING:
    from wllm_ray.dataset.reader import ActivationDataset, load_dataset

__all__ = ["ActivationDataset", "__version__", "load_dataset"]


def __getattr__(name: str) -> Any:
    """Import the reader when it is first asked for: ``import wllm_ray`` stays light."""
    if name in ("ActivationDataset", "load_dataset"):
        from wllm_ray.dataset import reader

        return getattr(reader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

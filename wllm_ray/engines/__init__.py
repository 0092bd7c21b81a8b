"""Engines in this process, without Ray: a model by name, text in, activations out.

::

    from wllm_ray import VLLMEngine

    with VLLMEngine("Qwen/Qwen3-0.6B", sites="L14_resid_post") as engine:
        found = engine.extract(["The sea is", "The sky is"])
        found.features  # [2, 1024] float32
        for receipt in engine.stream_to_disk(prompts, "root", "my-dataset"):
            print(receipt.shard, receipt.rows)

:class:`VLLMEngine` and :class:`TransformersEngine` share one interface,
:class:`~wllm_ray.engines.base.ActivationEngine`; importing this package imports neither library.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from wllm_ray.engines.activations import Activations
from wllm_ray.engines.auto_batch import AutoBatch
from wllm_ray.engines.base import ActivationEngine
from wllm_ray.engines.stream import ShardStream

if TYPE_CHECKING:
    from wllm_ray.engines.transformers import TransformersEngine
    from wllm_ray.engines.vllm import VLLMEngine

__all__ = [
    "ActivationEngine",
    "Activations",
    "AutoBatch",
    "ShardStream",
    "TransformersEngine",
    "VLLMEngine",
]


_MODULES = {
    "TransformersEngine": "wllm_ray.engines.transformers",
    "VLLMEngine": "wllm_ray.engines.vllm",
}


def __getattr__(name: str) -> Any:
    """Import an engine when it is first asked for, and with it what runs the model."""
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

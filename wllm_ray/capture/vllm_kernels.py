"""What vLLM does on a CPU that would let a row depend on others, put right.

The numbers are those of the catalogue in :mod:`wllm_ray.capture.vllm_worker`.
"""

from __future__ import annotations

import logging
import sys
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["empty_blocks_before_use", "empty_blocks_with", "prefer_invariant_kernels"]

_log = logging.getLogger(__name__)


def prefer_invariant_kernels() -> None:
    """On CPU, choose matrix kernels whose results do not depend on the number of rows (15)."""
    from vllm.model_executor.layers import utils

    if hasattr(utils, "_CPU_SGL_GEMM_MAX_WEIGHT_BYTES"):
        utils._CPU_SGL_GEMM_MAX_WEIGHT_BYTES = sys.maxsize  # noqa: SLF001
    else:
        _log.warning("this vLLM chooses its matrix kernels in a way that is not known here")


def empty_blocks_before_use() -> None:
    """On CPU, have blocks of the key-value cache emptied before a request gets them (19).

    Attention multiplies whatever lies behind a request's own tokens in its last block by zero. A
    NaN that an earlier request left there would spread to rows that have nothing to do with it.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda _: True)


def empty_blocks_with(runner: Any, vllm_config: Any) -> None:
    """Let this runner empty blocks of every kind of attention; vLLM's own leaves some out."""
    blocks = int(runner.kv_cache_config.num_blocks)
    layers = vllm_config.compilation_config.static_forward_context.values()
    found = (getattr(layer, "kv_cache", None) for layer in layers)
    # Layers that share a cache are emptied once.
    caches = {kv.data_ptr(): kv for kv in found if isinstance(kv, torch.Tensor) and kv.numel()}

    def empty(block_ids: list[int]) -> None:
        ids = torch.tensor(block_ids)
        for cache in caches.values():
            # A block of the scheduler may be several of the kernel's.
            parts = torch.arange(cache.shape[0] // blocks)
            places = (ids[:, None] * len(parts) + parts).flatten()
            cache.index_fill_(0, places, 0)

    runner._zero_block_ids = empty  # noqa: SLF001
    runner.kv_block_zeroer = SimpleNamespace(zero_block_ids=empty)

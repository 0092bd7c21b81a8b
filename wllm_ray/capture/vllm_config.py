"""How vLLM is set up for capture: one process, eager, no prefix cache, splits at fixed multiples.

The numbers of the vLLM internals used are those of the catalogue in
:mod:`wllm_ray.capture.vllm_worker`.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from wllm_ray.capture.admission import MIN_PASS_TOKENS
from wllm_ray.capture.precision import Precision, dtype_for, use_ieee_matmuls
from wllm_ray.capture.profiles import check_vllm_version
from wllm_ray.capture.vllm_kernels import empty_blocks_before_use, prefer_invariant_kernels
from wllm_ray.errors import InvalidInputError, NotOfferedError

__all__ = ["BuiltConfig", "EngineOptions", "build_config"]

_EXTENSION = "wllm_ray.capture.vllm_worker.CaptureExtension"
_CPU_BLOCK_SIZE = 32
_MIN_SPLIT_TOKENS = MIN_PASS_TOKENS
_LEAST_RECURRENT_CACHE_BYTES = 1 << 30
_PARALLELISM = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
# Arguments of vLLM that capture sets itself, or that would break what it proves.
_OURS = {
    "async_scheduling",
    "enable_chunked_prefill",
    "enable_lora",
    "enable_prefix_caching",
    "enforce_eager",
    "long_prefill_token_threshold",
    "max_num_batched_tokens",
    "scheduler_cls",
    "speculative_config",
    "worker_extension_cls",
}


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How the engine is built; see :class:`~wllm_ray.capture.vllm_capture.VLLMCapture`."""

    model: str
    revision: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    prefill_split_tokens: int = 1024
    max_num_seqs: int = 256
    threads: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    precision: Precision = "native"
    prefix_caching: bool = False
    depth_bounded: bool = True
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    allow_unprofiled_vllm: bool = False
    hf_overrides: dict[str, Any] | None = None
    vllm_args: dict[str, Any] = field(default_factory=dict)

    def check(self, *, selftest: bool) -> None:
        """Refuse what cannot work, before anything is loaded.

        Raises:
            NotOfferedError: Tensor or pipeline parallelism above 1.
            InvalidInputError: A size that cannot be used.
        """
        parallel = {name: self.vllm_args.get(name, getattr(self, name, 1)) for name in _PARALLELISM}
        if set(parallel.values()) != {1}:
            raise NotOfferedError(
                f"capture runs without parallelism inside one engine, found {parallel}; run more "
                "replicas instead",
                code="parallelism_not_offered",
            )
        dtype_for(self.precision, self.dtype)
        if self.prefill_split_tokens < _MIN_SPLIT_TOKENS:
            raise InvalidInputError(
                f"prefill_split_tokens must be at least {_MIN_SPLIT_TOKENS}, found "
                f"{self.prefill_split_tokens}",
                code="invalid_argument",
            )
        if taken := sorted(self.vllm_args.keys() & _OURS):
            raise NotOfferedError(
                f"vllm_args may not set {', '.join(taken)}: capture depends on it; what can be "
                "chosen is an argument of the engine itself",
                code="feature_not_offered",
            )
        if self.allow_unprofiled_vllm and not selftest:
            raise InvalidInputError(
                "allow_unprofiled_vllm needs the self-test: nothing else speaks for such a vLLM",
                code="invalid_argument",
            )
        # Shorter than the least pass, a filler would not fit into the model.
        least = {"max_num_seqs": 1, "threads": 1, "max_model_len": MIN_PASS_TOKENS}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise InvalidInputError(
                    f"{name} must be at least {bound}, found {value}", code="invalid_argument"
                )


def prepare_environment(options: EngineOptions) -> None:
    """Set what vLLM reads from the environment; before its first import in this process."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    # What a command prints is its result.
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    if Path(options.model).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")


@dataclass(frozen=True, slots=True)
class BuiltConfig:
    """vLLM's configuration, ready for an engine core.

    Attributes:
        vllm_config: vLLM's own object.
        max_model_len: Tokens of the longest prompt that may be captured.
        threads: CPU threads, or None on a GPU.
    """

    vllm_config: Any
    max_model_len: int
    threads: int | None


def build_config(options: EngineOptions) -> BuiltConfig:
    """Make vLLM's configuration, and set the calling thread's number of CPU threads.

    Raises:
        NotOfferedError: A vLLM version without a profile.
    """
    prepare_environment(options)
    import vllm
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    check_vllm_version(vllm.__version__, allow_unprofiled=options.allow_unprofiled_vllm)
    on_cpu = bool(current_platform.is_cpu())
    threads = _set_threads(options.threads) if on_cpu else None
    if on_cpu:
        prefer_invariant_kernels()
        empty_blocks_before_use()
    if options.precision == "matched":
        use_ieee_matmuls()
    config = EngineArgs(**_engine_args(options, on_cpu=on_cpu)).create_engine_config()
    max_model_len = _make_room(config.model_config)
    if on_cpu and options.kv_cache_memory_bytes is None:
        config.cache_config.kv_cache_memory_bytes = _cache_bytes(config, max_model_len)
    return BuiltConfig(config, max_model_len, threads)


def _set_threads(threads: int | None) -> int:
    # An earlier engine in this process may have replaced torch's own name (catalogue, 14).
    torch._C.set_num_threads(threads or 1)  # noqa: SLF001
    return threads or 1


def _dtype(options: EngineOptions) -> str:
    """``auto`` means the dtype that the model was saved in; vLLM's own ``auto`` narrows float32."""
    from vllm.transformers_utils.config import get_config

    dtype = dtype_for(options.precision, options.dtype)
    if dtype != "auto":
        return dtype
    trust = bool(options.vllm_args.get("trust_remote_code", False))
    config = get_config(options.model, trust_remote_code=trust, revision=options.revision)
    saved = config.get_text_config().dtype
    return "float32" if saved in (torch.float32, "float32") else "auto"


def _engine_args(options: EngineOptions, *, on_cpu: bool) -> dict[str, Any]:
    requests = min(options.max_num_seqs, options.prefill_split_tokens - 1)
    args: dict[str, Any] = {
        "model": options.model,
        "revision": options.revision,
        "skip_tokenizer_init": True,
        "dtype": _dtype(options),
        "max_model_len": options.max_model_len,
        "max_num_batched_tokens": options.prefill_split_tokens,
        # One more for the filler.
        "max_num_seqs": requests + 1,
        "enforce_eager": True,
        "enable_prefix_caching": options.prefix_caching,
        "enable_chunked_prefill": True,
        "async_scheduling": False,
        "worker_extension_cls": _EXTENSION,
        "kv_cache_memory_bytes": options.kv_cache_memory_bytes,
        "gpu_memory_utilization": options.gpu_memory_utilization,
        "generation_config": "vllm",
        "max_logprobs": 20,
        "seed": 0,
    }
    if on_cpu:
        args["block_size"] = _CPU_BLOCK_SIZE
    if options.hf_overrides:
        args["hf_overrides"] = options.hf_overrides
    return args | options.vllm_args


def _make_room(model_config: Any) -> int:
    """Let a prompt of exactly the model's length run (catalogue, 12); return that length.

    The scheduler keeps one position free for a sampled token. That token is never run here, so no
    position beyond the model's is ever computed. Where the extra position would make the model
    choose other weights (long-rope factors, attention temperature), the longest prompt is one
    token shorter instead.
    """
    length = int(model_config.max_model_len)
    if _switches_at(model_config.hf_text_config, length):
        return length - 1
    model_config.max_model_len = length + 1
    return length


def _switches_at(text_config: Any, length: int) -> bool:
    rope = getattr(text_config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {
        part.get("rope_type") for part in rope.values() if isinstance(part, dict)
    }
    original = getattr(text_config, "original_max_position_embeddings", None)
    original = original or rope.get("original_max_position_embeddings")
    tuned = getattr(text_config, "model_type", "") == "llama4_text" and length == 32768  # noqa: PLR2004
    return tuned or ("longrope" in kinds and length == original)


def _cache_bytes(config: Any, max_model_len: int) -> int:
    """Enough for a full pass beside one prompt of the longest length.

    Left to itself, vLLM takes a fraction of all memory, and a second replica fails to start.
    """
    model, scheduler = config.model_config, config.scheduler_config
    layers = model.get_num_layers(config.parallel_config)
    heads = model.get_num_kv_heads(config.parallel_config)
    # Keys and values of all layers.
    token = 2 * layers * heads * model.get_head_size() * model.dtype.itemsize
    block = config.cache_config.block_size
    blocks = scheduler.max_num_seqs + math.ceil(scheduler.max_num_batched_tokens / block)
    blocks += math.ceil((max_model_len + 1) / block) + 2
    # A quarter more: layers of unlike attention are grouped, and groups are padded.
    needed = int(1.25 * blocks * block * token)
    # Recurrent states are as large as many blocks of attention, and pages take the larger's size.
    return max(needed, _LEAST_RECURRENT_CACHE_BYTES) if model.has_inner_state else needed

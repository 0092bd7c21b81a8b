"""vLLM in this process, for people: text in, activations out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, TypedDict, Unpack

from wllm_ray.capture.model_files import resolve_model
from wllm_ray.capture.precision import Precision
from wllm_ray.capture.tokenizer import TransformersTokenizer
from wllm_ray.capture.vllm_capture import VLLMCapture
from wllm_ray.engines.base import ActivationEngine
from wllm_ray.engines.options import refuse
from wllm_ray.engines.wanted import Sites
from wllm_ray.positions import PositionLike
from wllm_ray.records import ModelIdentity

__all__ = ["VLLMEngine", "VLLMOptions", "load_vllm"]


class VLLMOptions(TypedDict, total=False):
    """How the engine is built; ``VLLMCapture`` explains each."""

    served_model_name: str | None
    dtype: str
    max_model_len: int | None
    prefill_split_tokens: int
    max_num_seqs: int
    threads: int | None
    kv_cache_memory_bytes: int | None
    gpu_memory_utilization: float
    precision: Precision
    prefix_caching: bool
    depth_bounded: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    allow_unprofiled_vllm: bool
    hf_overrides: dict[str, Any] | None
    vllm_args: dict[str, Any] | None
    selftest: bool
    progress_limit_s: float


def load_vllm(
    model: str | os.PathLike[str],
    identity: ModelIdentity | None = None,
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **options: Unpack[VLLMOptions],
) -> tuple[VLLMCapture, TransformersTokenizer]:
    """A started engine for token ids, and the tokenizer that makes them.

    Args:
        model: A local directory, or a name on a hub.
        identity: Which weights these are, where that was found out before.
        revision: A branch, tag or commit on the hub, where ``identity`` is omitted.
        trust_remote_code: Run code that comes with the model and its tokenizer.
        options: How the engine is built.

    Raises:
        NotFoundError: No such model.
        NotOfferedError: An option that is not offered.
        InvalidInputError: An option that does not exist or cannot be used.
        CaptureError: The engine could not be built, or its self-test failed.
    """
    refuse(options, VLLMOptions.__annotations__)
    name = os.fspath(model)
    identity = identity or resolve_model(name, revision)
    tokenizer = TransformersTokenizer(name, identity, trust_remote_code=trust_remote_code)
    vllm_args = {"trust_remote_code": trust_remote_code} | (options.get("vllm_args") or {})
    options["vllm_args"] = vllm_args
    engine = VLLMCapture(
        name, model_identity=identity, tokenizer_identity=tokenizer.identity, **options
    )
    return engine, tokenizer


class VLLMEngine(ActivationEngine):
    """A model in vLLM, in this process; one at a time in a process.

    ::

        with VLLMEngine("Qwen/Qwen3-0.6B", layers=[7, 14]) as engine:
            found = engine.extract(["The sea is", "The sky is"])
            found.features  # [2, 2, 1024] float32

    Args:
        model: A local directory, or a name on a hub.
        sites: What to read where a call does not say; default: the stream after the last block.
        layers: Zero-based blocks that ``site`` applies to.
        site: The site kind for ``layers``; ``block`` is ``resid_post``.
        position: Which tokens of each input.
        revision: A branch, tag or commit on the hub.
        trust_remote_code: Run code that comes with the model and its tokenizer.
        options: How the engine is built, see :class:`VLLMOptions`.

    Raises:
        NotFoundError: No such model.
        InvalidInputError: A site, layer, position or option that cannot be.
        NotOfferedError: Something that this product does not do; the message says what to do
            instead.
        CaptureError: The engine could not be built, or its self-test failed.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        sites: Sites | None = None,
        *,
        layers: int | Sequence[int] | None = None,
        site: str = "block",
        position: PositionLike = "last_prompt",
        revision: str | None = None,
        trust_remote_code: bool = False,
        **options: Unpack[VLLMOptions],
    ) -> None:
        refuse(options, VLLMOptions.__annotations__)
        super().__init__(
            lambda: load_vllm(
                model, revision=revision, trust_remote_code=trust_remote_code, **options
            ),
            sites,
            layers=layers,
            site=site,
            position=position,
        )

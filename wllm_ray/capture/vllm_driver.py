"""Builds vLLM's engine core in this process and drives it step by step.

The core is driven directly: no tokenizer, no detokenizer, no output processor. Everything here
runs on the engine's own thread. The numbers of the vLLM internals used are those of the catalogue
in :mod:`wllm_ray.capture.vllm_worker`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from wllm_ray.capture.admission import Limits
from wllm_ray.capture.anatomy import Anatomy
from wllm_ray.capture.coverage import SitesWanted
from wllm_ray.capture.passes import PassCapture
from wllm_ray.capture.topology import Topology
from wllm_ray.capture.vllm_config import BuiltConfig, EngineOptions, build_config
from wllm_ray.capture.vllm_worker import WorkerFacts
from wllm_ray.errors import CaptureError, InvalidInputError

__all__ = ["Finished", "VLLMDriver", "build_driver"]

_PROBE_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that the engine ended.

    Attributes:
        request_id: Which one.
        error: Why it ended without running its whole prompt, or None.
        logprobs: Token id → log-probability, where the request asked for them.
    """

    request_id: str
    error: str | None
    logprobs: dict[int, float]


def build_driver(options: EngineOptions) -> VLLMDriver:
    """Load the model on the calling thread, which owns the engine from then on.

    Raises:
        NotOfferedError: A vLLM version without a profile.
        CaptureError: The model's structure is not understood.
        Exception: Whatever vLLM raises when it cannot load the model.
    """
    built = build_config(options)
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    config = built.vllm_config
    core = EngineCore(config, Executor.get_class(config), log_stats=False)
    return VLLMDriver(core, built, options)


class VLLMDriver:
    """One engine core. Not thread-safe: the engine's thread alone calls it.

    Attributes:
        facts: What the worker knows of its model.
        topology: Where the residual stream is.
        anatomy: Every site that can be read, and how.
        capture: The reservations; rows reserved here are captured in the passes to come.
        limits: What one pass can hold.
        max_model_len: Tokens of the longest prompt.
        threads: CPU threads, or None on a GPU.
    """

    def __init__(self, core: Any, built: BuiltConfig, options: EngineOptions) -> None:
        self._core = core
        self._prefix_caching = options.prefix_caching
        self.max_model_len = built.max_model_len
        self.threads = built.threads
        self._wants_logprobs = False
        try:
            self.limits = _limits(core, options.prefill_split_tokens, built.max_model_len)
            self.facts: WorkerFacts = self._rpc("wllm_facts")
            settled = self._rpc("wllm_settle", self._probe_pass, _PROBE_TOKENS)
            self.topology: Topology = settled[0]
            self.anatomy: Anatomy = settled[1]
            self.capture: PassCapture = self._rpc("wllm_install", self.topology, self.anatomy)
        except BaseException:
            self.close()
            raise

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        *,
        wanted: SitesWanted | None = None,
        num_logprobs: int | None = None,
        max_tokens: int = 1,
    ) -> None:
        """Hand a prompt to the scheduler.

        Args:
            request_id: Never used before.
            token_ids: The prompt.
            wanted: What is read of it; None where nothing is and the pass may be as shallow as the
                others in it allow.
            num_logprobs: How many of the likeliest next tokens to return.
            max_tokens: How many tokens to generate; the first is of no use where the pass is cut.
        """
        from vllm.sampling_params import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        depth = -1 if wanted is None else wanted.depth
        if num_logprobs is None and max_tokens == 1:
            self.capture.expect(request_id, depth)
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            logprobs=num_logprobs,
            detokenize=False,
            ignore_eos=True,
            # A cached token is never run, so nothing can be read of it.
            skip_reading_prefix_cache=wanted is None or not wanted.last_only,
        )
        request = EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(token_ids),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=time.time(),
            lora_request=None,
            # What a shallow pass left in the cache has nothing of the deeper blocks.
            cache_salt=f"wllm-depth-{depth}" if self._prefix_caching else None,
            data_parallel_rank=None,
        )
        self._core.add_request(*self._core.preprocess_add_request(request))
        self._wants_logprobs |= num_logprobs is not None

    def abort(self, request_ids: Sequence[str]) -> None:
        """Take requests out of the scheduler; those that it does not know are passed over."""
        self._core.abort_requests(list(request_ids))

    def step(self) -> list[Finished]:
        """Run one pass and say which requests ended.

        Raises:
            CaptureError: The scheduler ran nothing (code ``engine_dead``); stepping again would
                spin for ever.
        """
        # vLLM compiles a helper of its sampler for log-probabilities: 20 s for one probe prompt.
        stance = "force_eager" if self._wants_logprobs else "default"
        with torch.compiler.set_stance(stance):
            outputs, ran = self._core.step()
        self._wants_logprobs = False
        if not ran:
            raise CaptureError(
                "the scheduler ran no token although requests are waiting",
                code="engine_dead",
            )
        finished = [one for group in outputs.values() for one in group.outputs if one.finished]
        return [_finished(output) for output in finished]

    def log_probabilities(self, rows: Any) -> Any:
        """[N, vocab] float32 from [N, hidden] rows of the last block."""
        return self._rpc("wllm_log_probabilities", self.topology, self.capture, rows)

    def close(self) -> None:
        """Free the model and the key-value cache."""
        self._core.shutdown()

    def _rpc(self, method: str, *args: Any) -> Any:
        return self._core.collective_rpc(method, args=args)[0]

    def _probe_pass(self) -> None:
        vocabulary = self.facts.vocab_size
        ids = [7 + i % (vocabulary - 8) for i in range(_PROBE_TOKENS)]
        # Compiled helpers would hide what they do from the probe.
        with torch.compiler.set_stance("force_eager"):
            self.add("wllm-probe", ids, max_tokens=1, num_logprobs=0)
            self.step()


def _finished(output: Any) -> Finished:
    reason = str(output.finish_reason)
    logprobs: dict[int, float] = {}
    if output.new_logprobs is not None:
        ids, values = output.new_logprobs.logprob_token_ids[0], output.new_logprobs.logprobs[0]
        logprobs = {int(i): float(v) for i, v in zip(ids, values, strict=True)}
    error = None if reason in ("stop", "length") else f"the engine ended it with {reason!r}"
    return Finished(output.request_id, error, logprobs)


def _limits(core: Any, pass_tokens: int, max_model_len: int) -> Limits:
    scheduler = core.scheduler
    cache = scheduler.kv_cache_config
    sizes = [group.kv_cache_spec.block_size for group in cache.kv_cache_groups]
    # Where vLLM cannot split prompts (catalogue, 13) it raises its own budget to the longest one.
    split_tokens = int(scheduler.max_num_scheduled_tokens)
    limits = Limits(
        pass_tokens=min(pass_tokens, split_tokens),
        split_tokens=split_tokens,
        max_requests=int(scheduler.max_num_running_reqs) - 1,
        # One block is vLLM's null block; the filler takes one in every group.
        cache_blocks=int(cache.num_blocks) - 1 - len(sizes),
        blocks_for=lambda tokens: sum(math.ceil(tokens / size) for size in sizes),
    )
    _check_limits(
        limits, max_model_len, can_split=scheduler.scheduler_config.enable_chunked_prefill
    )
    return limits


def _check_limits(limits: Limits, max_model_len: int, *, can_split: bool) -> None:
    """Refuse sizes with which the longest prompt would wait for ever."""
    needed = limits.blocks_for(max_model_len)
    if needed > limits.cache_blocks:
        raise InvalidInputError(
            f"a prompt of {max_model_len} tokens takes {needed} blocks of the key-value cache, "
            f"which has room for {limits.cache_blocks}; raise kv_cache_memory_bytes or lower "
            "max_model_len",
            code="invalid_argument",
        )
    if not can_split and max_model_len > limits.split_tokens:
        raise InvalidInputError(
            f"this model's prompts cannot be split, and one pass takes {limits.split_tokens} "
            f"tokens; lower max_model_len from {max_model_len} to that",
            code="invalid_argument",
        )

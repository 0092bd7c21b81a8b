"""The worker extension: where wllm_ray reaches into vLLM, and the catalogue of what it relies on.

Every vLLM internal that capture depends on, with the version that it was seen in and what happens
when it changes. Numbers 1 to 8 are used here, 15 and 19 in :mod:`wllm_ray.capture.vllm_kernels`, 16
and 17 in :mod:`wllm_ray.capture.vllm_head`, 9 to 14 and 18 in
:mod:`wllm_ray.capture.vllm_config` and :mod:`wllm_ray.capture.vllm_driver`.

 1. ``ParallelConfig.worker_extension_cls`` (0.32.0): mixes this class into the worker. A name that
    the worker has already is an assertion error at start, hence the prefix ``wllm_``. Gone: the
    first ``collective_rpc`` fails at start.
 2. ``Worker.model_runner`` (0.32.0): the runner. Gone: ``AttributeError`` at start.
 3. V1 ``GPUModelRunner._prepare_inputs(scheduler_output, num_scheduled_tokens)`` (0.32.0): lays
    out a pass. Gone: the runner is refused at start as unknown. No longer called once per pass:
    nothing is captured and the self-test fails.
 4. V1 ``runner.input_batch.req_ids``, ``.num_computed_tokens_cpu``, ``runner.query_start_loc.np``,
    ``runner.input_ids.cpu`` (0.32.0): order, offsets and ids of the pass, valid when
    ``_prepare_inputs`` returns. Gone: every row fails with ``hook_failed``, so the self-test fails.
    Different meaning: the router's comparison of token ids fails the rows.
 5. V2 ``GPUModelRunner.prepare_inputs(scheduler_output, ...)`` returning an ``InputBatch`` with
    ``req_ids``, ``num_tokens``, ``query_start_loc_np``, ``num_computed_tokens_np``,
    ``num_scheduled_tokens``, ``input_ids`` (0.32.0): the same for the second runner.
 6. ``runner.execute_model`` (0.32.0): holds exactly one forward pass. Dummy and profile passes do
    not come through ``(_)prepare_inputs``, so they find no plan. Gone: ``AttributeError`` at start.
 7. ``runner.model``, ``runner.model.compute_logits(hidden)`` (0.32.0): the module tree, and the
    path from normed hidden states to logits. Gone: ``AttributeError`` at start.
 8. ``vllm_config.model_config.get_hidden_size()``, ``.get_vocab_size()``,
    ``.hf_text_config.num_hidden_layers``, ``.dtype``, ``.architecture``, ``.has_inner_state``
    (0.32.0). Gone: ``AttributeError`` at start. Wrong: no list of blocks has that length, so start
    is refused.
 9. ``EngineArgs(...).create_engine_config()``, ``Executor.get_class`` (0.32.0). Changed: fails at
    start.
10. ``EngineCore(vllm_config, executor_class, log_stats)``, ``.preprocess_add_request``,
    ``.add_request``, ``.abort_requests``, ``.step``, ``.collective_rpc``, ``.shutdown`` (0.32.0):
    the in-process engine without tokenizer, detokenizer and output processor. Changed: fails at
    start, or with the first request, which is the self-test's.
11. ``EngineCoreRequest(...)`` fields by name; ``EngineCoreOutput.request_id``, ``.finish_reason``,
    ``.new_logprobs`` (0.32.0). Changed: as 10.
12. ``model_config.max_model_len`` is raised by one after the configuration is made, because the
    scheduler keeps room for one sampled token although that token is never run (0.32.0). Gone: the
    longest prompt stalls, which the driver reports as an engine that makes no progress.
13. ``scheduler.max_num_scheduled_tokens``, ``.max_num_running_reqs``,
    ``.scheduler_config.enable_chunked_prefill``, ``.kv_cache_config.num_blocks``,
    ``.kv_cache_groups`` (0.32.0): the limits that admission keeps to. For some kinds of attention
    vLLM does not split prompts and raises its budget to the longest one. Changed: fails at start;
    wrong: passes are not run as planned, which is noticed by comparing plan and pass.
14. On CPU the worker replaces ``torch.set_num_threads`` by a function that does nothing (0.32.0),
    so the driver sets the threads before the worker is made, through ``torch._C``.
15. ``vllm.model_executor.layers.utils._CPU_SGL_GEMM_MAX_WEIGHT_BYTES`` (0.32.0): on CPUs with AMX,
    16-bit weights above this size go to oneDNN, whose AMX kernels add up in another order for other
    numbers of rows; the kernel below it does not (from 5 rows on). Raised before the model is
    loaded, because weights are packed for one kernel or the other at that time. Costs up to an
    eighth of the speed. Read nowhere else, so without AMX it changes nothing. Gone or without
    effect: the self-test finds class ``tolerance``.
16. V1 ``runner._sample(logits, spec_decode_metadata)`` and ``runner.model.compute_logits(hidden)``
    (0.32.0): left out of passes in which nobody wants a token, which then get token 0 and finish.
    Gone: ``AttributeError`` at start. No longer called there: the head runs, which only costs time.
17. V2 ``runner.sample(hidden_states, input_batch, grammar_output)`` and
    ``get_num_sampled_and_rejected`` (0.32.0): the same for the second runner.
18. ``SamplingParams.skip_reading_prefix_cache``, ``EngineCoreRequest.cache_salt`` (0.32.0): a
    request that is read before its last token computes all of itself; entries made at one depth
    are not read at another. Gone: fails with the first request. Without effect: coverage fails the
    rows.
19. ``KVCacheConfig.needs_kv_cache_zeroing`` and the runner's ``_zero_block_ids`` (V1) or
    ``kv_block_zeroer`` (V2) (0.32.0): on CPU, attention multiplies what an earlier request left in
    a block by zero, and a NaN stays one. So blocks are emptied before they are used again. Gone or
    without effect: after a row with NaN, other rows fail with ``non_finite``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wllm_ray.capture.anatomy import Anatomy, dissect
from wllm_ray.capture.block_lists import find_block_lists
from wllm_ray.capture.depth import DepthBound
from wllm_ray.capture.hooks import SiteHooks
from wllm_ray.capture.passes import PassCapture
from wllm_ray.capture.probe import Probe
from wllm_ray.capture.router import Pass
from wllm_ray.capture.staging import stager_for
from wllm_ray.capture.topology import Topology, settle
from wllm_ray.capture.vllm_head import leave_out_head_v1, leave_out_head_v2
from wllm_ray.capture.vllm_kernels import empty_blocks_with
from wllm_ray.errors import CaptureError, NotOfferedError

__all__ = ["CaptureExtension", "WorkerFacts"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What the worker knows of its model.

    ``recurrent``: some layers carry a state from pass to pass (Mamba, short convolutions).
    """

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    recurrent: bool


class CaptureExtension:
    """Mixed into vLLM's worker; every method is called by name through ``collective_rpc``."""

    model_runner: Any
    vllm_config: Any

    def wllm_facts(self) -> WorkerFacts:
        """Read what the configuration says of the model."""
        config = self.vllm_config.model_config
        return WorkerFacts(
            architecture=str(config.architecture),
            num_layers=int(config.hf_text_config.num_hidden_layers),
            hidden_size=int(config.get_hidden_size()),
            vocab_size=int(config.get_vocab_size()),
            dtype=config.dtype,
            device=torch.device(self.model_runner.device),
            recurrent=bool(config.has_inner_state),
        )

    def wllm_settle(
        self, run_probe_pass: Callable[[], None], num_tokens: int
    ) -> tuple[Topology, Anatomy]:
        """Find the blocks and every site, while ``run_probe_pass`` runs exactly one pass.

        Args:
            run_probe_pass: Runs the pass through this engine.
            num_tokens: How many tokens it has.
        """
        facts, model = self.wllm_facts(), self.model_runner.model
        _refuse_rescaled_stream(facts, self.vllm_config.model_config.hf_text_config)
        lists = find_block_lists(model, facts.num_layers)
        with Probe(model, lists, facts.hidden_size, num_tokens) as probe:
            run_probe_pass()
        with torch.inference_mode():
            topology = settle(probe.log, lists, dict(model.named_modules()))
            return topology, dissect(probe.log, topology)

    def wllm_install(self, topology: Topology, anatomy: Anatomy) -> PassCapture:
        """Follow the runner's passes from now on."""
        runner = self.model_runner
        if self.wllm_facts().device.type == "cpu":
            empty_blocks_with(runner, self.vllm_config)
        hooks = SiteHooks(anatomy.readings, stager_for(self.wllm_facts().device))
        capture = PassCapture(hooks, DepthBound(runner.model, topology.blocks))
        _follow_passes(runner, capture)
        return capture

    def wllm_log_probabilities(
        self, topology: Topology, capture: PassCapture, rows: np.ndarray[Any, np.dtype[np.float32]]
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Next-token log-probabilities from captured rows of the last block.

        Args:
            topology: Where the final norm is.
            capture: What follows the passes; it must let the head run.
            rows: [N, hidden] float32.

        Returns:
            [N, vocab] float32, or more columns where the model pads its vocabulary.
        """
        facts = self.wllm_facts()
        with torch.inference_mode():
            stream = torch.from_numpy(rows).to(facts.device, facts.dtype)
            normed = topology.final_norm(stream)
            normed = normed[0] if isinstance(normed, tuple) else normed
            capture.headless = False
            logits = self.model_runner.model.compute_logits(normed * topology.head_factor)
            result: np.ndarray[Any, np.dtype[np.float32]] = (
                torch.log_softmax(logits.float(), dim=-1).cpu().numpy()
            )
        return result


def _refuse_rescaled_stream(facts: WorkerFacts, text_config: Any) -> None:
    """VLLM divides DeepSeek's whole stream by this factor in float16, so that it fits."""
    factor = getattr(text_config, "routed_scaling_factor", 1.0)
    if facts.dtype == torch.float16 and "Deepseek" in facts.architecture and factor != 1.0:
        raise NotOfferedError(
            f"vLLM runs {facts.architecture} in float16 with its stream divided by {factor:g}; use "
            "bfloat16 or float32",
            code="feature_not_offered",
        )


def _follow_passes(runner: Any, capture: PassCapture) -> None:
    """Wrap the runner's own methods, on this instance."""
    read: Callable[..., Pass]
    if hasattr(runner, "_prepare_inputs"):
        name, read = "_prepare_inputs", _read_v1
        leave_out_head_v1(runner, capture)
    elif hasattr(runner, "prepare_inputs"):
        name, read = "prepare_inputs", _read_v2
        leave_out_head_v2(runner, capture)
    else:
        raise CaptureError(
            f"the model runner {type(runner).__qualname__} has neither _prepare_inputs (V1) nor "
            "prepare_inputs (V2); this vLLM lays out its passes in a way that is not understood",
            code="unknown_structure",
        )
    prepare, execute = getattr(runner, name), runner.execute_model

    def prepare_and_begin(*args: Any, **kwargs: Any) -> Any:
        prepared = prepare(*args, **kwargs)
        _guarded(capture, lambda: capture.begin(read(runner, prepared, *args)))
        return prepared

    def execute_and_end(*args: Any, **kwargs: Any) -> Any:
        try:
            return execute(*args, **kwargs)
        finally:
            _guarded(capture, capture.end)

    setattr(runner, name, prepare_and_begin)
    runner.execute_model = execute_and_end


def _guarded(capture: PassCapture, action: Callable[[], None]) -> None:
    """An exception that reached the engine would leave it spinning; it fails the rows instead."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 (as the docstring says)
        _log.exception("a forward pass could not be read")
        capture.fail_all(
            f"a forward pass could not be read ({type(error).__name__}); the log has more"
        )


def _read_v1(runner: Any, _: Any, scheduler_output: Any, num_scheduled: Any) -> Pass:
    batch, requests = runner.input_batch, len(num_scheduled)
    total = int(scheduler_output.total_num_scheduled_tokens)
    return Pass(
        request_ids=tuple(batch.req_ids[:requests]),
        query_start_loc=_ints(runner.query_start_loc.np[: requests + 1]),
        num_computed=_ints(batch.num_computed_tokens_cpu[:requests]),
        num_scheduled=_ints(num_scheduled),
        token_ids=_ints(runner.input_ids.cpu[:total].numpy()),
    )


def _read_v2(_: Any, batch: Any, *__: Any) -> Pass:
    requests = len(batch.req_ids)
    return Pass(
        request_ids=tuple(batch.req_ids),
        query_start_loc=_ints(batch.query_start_loc_np[: requests + 1]),
        num_computed=_ints(batch.num_computed_tokens_np[:requests]),
        num_scheduled=_ints(batch.num_scheduled_tokens[:requests]),
        token_ids=_ints(batch.input_ids[: batch.num_tokens].cpu().numpy()),
    )


def _ints(values: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """A copy: the runner reuses its arrays in the next pass."""
    return np.array(values, dtype=np.int64)

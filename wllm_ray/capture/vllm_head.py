"""Leaves head and sampler out of passes in which nobody wants a token.

The numbers are those of the catalogue in :mod:`wllm_ray.capture.vllm_worker`.
"""

from __future__ import annotations

from typing import Any

import torch

from wllm_ray.capture.passes import PassCapture

__all__ = ["leave_out_head_v1", "leave_out_head_v2"]


def leave_out_head_v1(runner: Any, capture: PassCapture) -> None:
    """Give every request token 0 in passes in which nobody wants one (16)."""
    from vllm.v1.outputs import SamplerOutput

    compute_logits, sample = runner.model.compute_logits, runner._sample  # noqa: SLF001

    def logits_or_none(hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if capture.headless:
            return hidden.new_zeros((hidden.shape[0], 1))
        return compute_logits(hidden, *args, **kwargs)

    def sample_or_not(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if capture.headless:
            ids = torch.zeros((logits.shape[0], 1), dtype=torch.int32, device=logits.device)
            return SamplerOutput(sampled_token_ids=ids, logprobs_tensors=None)
        return sample(logits, *args, **kwargs)

    runner.model.compute_logits = logits_or_none
    runner._sample = sample_or_not  # noqa: SLF001


def leave_out_head_v2(runner: Any, capture: PassCapture) -> None:
    """The same for the second runner (17)."""
    from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
    from vllm.v1.worker.gpu.sample.output import SamplerOutput

    sample = runner.sample

    def sample_or_not(hidden: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not capture.headless:
            return sample(hidden, batch, *args, **kwargs)
        sampled, rejected = get_num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            runner.req_states.prefill_len.gpu,
        )
        ids = torch.zeros((batch.num_reqs, 1), dtype=torch.int64, device=runner.device)
        return SamplerOutput(ids, None, None, sampled, rejected), sampled, rejected

    runner.sample = sample_or_not

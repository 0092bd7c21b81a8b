"""Runs chunks on a model that Transformers loaded, or on any decoder module: one batch at a time.

The same machinery as in vLLM reads the sites: :class:`~wllm_ray.capture.hooks.SiteHooks` gathers,
:class:`~wllm_ray.capture.depth.DepthBound` stops passes, and the chunk's buffers prove that every
wanted value came once. Between chunks no hook is on the model.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wllm_ray.capture.anatomy import Anatomy, dissect
from wllm_ray.capture.block_lists import find_block_lists
from wllm_ray.capture.coverage import CaptureRow, ChunkCapture
from wllm_ray.capture.depth import DepthBound
from wllm_ray.capture.device_rows import DeviceChunk, DeviceStager
from wllm_ray.capture.hooks import Gather, SiteHooks
from wllm_ray.capture.probe import Probe
from wllm_ray.capture.staging import stager_for
from wllm_ray.capture.topology import Residual, Topology, settle
from wllm_ray.capture.transformers_batches import (
    SequencesPerCall,
    batch_limits,
    pad,
    plan_batches,
)
from wllm_ray.capture.transformers_model import LoadedModel, ModelCall, logits_of
from wllm_ray.errors import CaptureError
from wllm_ray.sites import HookSite

__all__ = ["TransformersDriver"]

_log = logging.getLogger(__name__)
_PROBE_TOKENS = 12


class TransformersDriver:
    """One model. Not thread-safe: the engine's thread alone calls it.

    Args:
        loaded: The model.
        sequences_per_call: The most rows of a forward pass, or ``auto``.

    Attributes:
        topology: Where the residual stream is.
        anatomy: Every site that can be read, and how.
        has_head: Whether the model returns logits.
        device, dtype: Of the model.
        depth_bounded: Whether passes stop at the deepest module that is read.
        pass_started: Monotonic seconds at which the forward pass that runs now began, or None.
        lost: The device failed in a way that no later pass can survive.

    Raises:
        CaptureError: The model's structure is not understood (``unknown_structure``), or it does
            not run (``capture_failed``).
    """

    def __init__(self, loaded: LoadedModel, sequences_per_call: SequencesPerCall) -> None:
        self._loaded = loaded
        self._call = ModelCall(loaded.module)
        self._limits = batch_limits(sequences_per_call, loaded.device.type, loaded.switches_at)
        self.device, self.dtype = loaded.device, loaded.dtype
        self.depth_bounded = False
        self.pass_started: float | None = None
        self.lost = False
        with torch.no_grad():
            self._settle()
        # The last norm counts as one block more: a pass that is read there needs no head.
        stops = self.topology.blocks
        if HookSite(None, "final_norm") in self.anatomy.readings:
            stops = (*stops, self.topology.final_norm)
        self._bound = DepthBound(self._call, stops)
        readings = self.anatomy.readings
        self._hooks = SiteHooks(readings, stager_for(loaded.device))
        self._device_hooks = SiteHooks(readings, DeviceStager(loaded.device))

    def run(self, chunk: ChunkCapture, go_on: Callable[[], None]) -> None:
        """Run all rows of a chunk.

        Args:
            chunk: Its buffers; they are filled but not proven.
            go_on: Called before every pass; raises where the chunk is not wanted any more.

        Raises:
            CaptureError: The model raised (``capture_failed``); other chunks can still be run
                unless the device is lost (``engine_dead``).
        """
        hooks = self._device_hooks if isinstance(chunk, DeviceChunk) else self._hooks
        lengths = [len(row.wanted.token_ids) for row in chunk.rows]
        # Not inference mode: what the model keeps for itself, and what a caller is given, must
        # stay usable with gradients.
        with torch.no_grad():
            try:
                for batch in plan_batches(lengths, self._limits):
                    go_on()
                    self._pass(chunk, [chunk.rows[number] for number in batch], hooks)
            finally:
                hooks.remove()
                self._bound.remove()

    def log_probabilities(self, rows: NDArray[np.float32]) -> NDArray[np.float32]:
        """[N, vocab] next-token log-probabilities from [N, hidden] rows of the last block.

        The model itself makes them: it runs on a prompt of N tokens, and what its last block
        returns is replaced by the rows. Whatever comes after the blocks treats each token alone.
        """
        given = torch.from_numpy(rows)[None].to(self._loaded.device)
        last = self.topology.blocks[-1]
        handle = last.register_forward_hook(
            lambda _module, _args, output: _replaced(output, given, self.topology.residual)
        )
        try:
            with torch.no_grad():
                output = self._call.forward(self._probe_ids(len(rows)), all_logits=True)
        finally:
            handle.remove()
        logits = logits_of(output, self._loaded.vocab_size)
        assert logits is not None
        found: NDArray[np.float32] = torch.log_softmax(logits[0].float(), dim=-1).cpu().numpy()
        return found

    def _settle(self) -> None:
        module, loaded = self._loaded.module, self._loaded
        lists = find_block_lists(module, loaded.num_layers)
        ids = self._probe_ids(_PROBE_TOKENS)
        try:
            with Probe(module, lists, loaded.hidden_size, _PROBE_TOKENS) as probe:
                output = self._call.forward(ids, all_logits=True)
        except Exception as error:
            raise self._failure(error, ids) from error
        self.has_head = logits_of(output, loaded.vocab_size) is not None
        self.topology: Topology = settle(probe.log, lists, dict(module.named_modules()))
        self.anatomy: Anatomy = dissect(probe.log, self.topology)

    def _probe_ids(self, tokens: int) -> torch.Tensor:
        usable = max(self._loaded.vocab_size - 8, 1)
        ids = [min(7 + i % usable, self._loaded.vocab_size - 1) for i in range(tokens)]
        return torch.tensor([ids], device=self._loaded.device)

    def _pass(self, chunk: ChunkCapture, rows: Sequence[CaptureRow], hooks: SiteHooks) -> None:
        ids = torch.from_numpy(pad([row.wanted.token_ids for row in rows]))
        wants_logits = chunk.num_logprobs is not None
        bounded = self.depth_bounded and not wants_logits
        self.pass_started = time.monotonic()
        try:
            hooks.begin([_gather(chunk, rows, ids.shape[1])])
            self._bound.begin(chunk.wanted.depth if bounded else None)
            output = self._call.forward(ids.to(self._loaded.device), all_logits=wants_logits)
            if wants_logits:
                self._note_logprobs(chunk, rows, output)
        except Exception as error:
            raise self._failure(error, ids) from error
        finally:
            hooks.end()
            problem = self._bound.end()
            self.pass_started = None
        if problem:
            for row in rows:
                row.fail("hook_failed", problem)

    def _note_logprobs(self, chunk: ChunkCapture, rows: Sequence[CaptureRow], output: Any) -> None:
        logits = logits_of(output, self._loaded.vocab_size)
        if logits is None or chunk.num_logprobs is None:
            return
        for row, of_row in zip(rows, logits, strict=True):
            last = of_row[len(row.wanted.token_ids) - 1]
            best = torch.log_softmax(last.float(), dim=-1).topk(chunk.num_logprobs)
            pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            row.logprobs = dict(pairs)

    def _failure(self, error: Exception, ids: torch.Tensor) -> CaptureError:
        """What went wrong in a pass; the model's own words are for the log alone."""
        rows, tokens = ids.shape
        what = f"a forward pass of {rows} rows of up to {tokens} tokens"
        _log.error("%s failed", what, exc_info=error)
        if isinstance(error, torch.AcceleratorError):
            self.lost = True
            return CaptureError(
                f"{what} broke the device ({type(error).__name__}; the log has more); the replica "
                "must be replaced",
                code="engine_dead",
            )
        if _is_memory(error):
            if self._loaded.device.type == "cuda":
                torch.cuda.empty_cache()
            return CaptureError(
                f"{what} does not fit into memory; lower sequences_per_call or max_model_len",
                code="capture_failed",
            )
        return CaptureError(
            f"the model raised {type(error).__name__} in {what}; the log has more",
            code="capture_failed",
        )


def _gather(chunk: ChunkCapture, rows: Sequence[CaptureRow], width: int) -> Gather:
    """Where the wanted positions lie among the flat, padded tokens of a pass."""
    flat = [number * width + row.wanted.positions for number, row in enumerate(rows)]
    slots = [np.arange(row.slots.start, row.slots.stop, dtype=np.int64) for row in rows]
    return Gather(chunk, np.concatenate(flat), np.concatenate(slots), tuple(rows))


def _replaced(output: Any, given: torch.Tensor, residual: Residual) -> Any:
    """What a block returned, with another stream in it; ``given`` is [1, N, hidden]."""
    if residual is Residual.TENSOR:
        return given.to(output.dtype)
    stream = given.to(output[0].dtype)
    if residual is Residual.FIRST:
        return (stream, *output[1:])
    return (stream, torch.zeros_like(stream))


def _is_memory(error: Exception) -> bool:
    """On a CPU, PyTorch says it in words only."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        "can't allocate memory" in str(error) or "not enough memory" in str(error)
    )

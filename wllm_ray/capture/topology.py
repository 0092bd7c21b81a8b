"""Where a model's residual stream can be read, settled by evidence and not by names.

Decoder blocks of different models return different things: ``(branch, residual)`` to be summed,
``(stream, stale)`` not to be summed, ``(stream, None)``, ``[T, D]`` or ``[1, T, D]``. The shape
does not tell which. So one probe pass is observed (:mod:`wllm_ray.capture.probe`), the model's own
final norm is replayed on each candidate, and the candidate that reproduces what the norm returned
in the pass is the stream. There is no table of known model families. A structure that this does
not explain is refused, and the error says what was seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from wllm_ray.capture.probe import BlockCall, ModuleCall, ProbeLog, tensors_in
from wllm_ray.errors import CaptureError

__all__ = ["Residual", "Topology", "find_block_lists", "read_stream", "settle"]

# Largest relative L2 between the replayed norm and what the model's own norm returned. The right
# candidate differs by rounding only; the wrong one has been seen as near as 0.2.
_TIGHT = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}


class Residual(StrEnum):
    """How the stream after a block is read off what the block returns."""

    TENSOR = "tensor"
    FIRST = "first element of the tuple"
    SUM = "sum of the tuple's two elements"


@dataclass(frozen=True, slots=True)
class Topology:
    """What was found out about a model.

    Attributes:
        blocks_name: Dotted name of the list of decoder blocks.
        blocks: The blocks, in order.
        residual: How the stream is read off a block's output.
        final_norm_name: Dotted name of the model's last norm.
        final_norm: That module.
        evidence: Relative L2 of the replayed final norm, for each candidate.
    """

    blocks_name: str
    blocks: tuple[nn.Module, ...]
    residual: Residual
    final_norm_name: str
    final_norm: nn.Module
    evidence: dict[Residual, float]

    def describe(self) -> str:
        """How the stream is read and what speaks for it, in one line."""
        seen = ", ".join(f"{kind} {error:.1e}" for kind, error in self.evidence.items())
        return (
            f"{self.residual} of {self.blocks_name}; {self.final_norm_name} replayed on each "
            f"candidate, relative L2: {seen}"
        )


def find_block_lists(model: nn.Module, num_layers: int) -> dict[str, tuple[nn.Module, ...]]:
    """All outermost ``ModuleList`` of the right length, by dotted name: the candidates.

    Raises:
        CaptureError: There is none (code ``unknown_structure``).
    """
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList)}
    fitting = [name for name, modules in lists.items() if len(modules) == num_layers]
    outermost = [a for a in fitting if not any(a.startswith(f"{b}.") for b in fitting if b != a)]
    if not outermost:
        seen = ", ".join(f"{name} ({len(modules)})" for name, modules in lists.items())
        raise _unknown(f"no list of {num_layers} decoder blocks; lists found: {seen or 'none'}")
    # Gemma 4 holds its blocks in a second list as well, under another name.
    found: dict[tuple[nn.Module, ...], str] = {}
    for name in outermost:
        found.setdefault(tuple(lists[name]), name)
    return {name: blocks for blocks, name in found.items()}


def read_stream(output: Any, residual: Residual, rows: torch.Tensor | None = None) -> torch.Tensor:
    """The residual stream after a block, as memory of its own.

    The one place where the stream is read, for hooks, settling and self-test alike. A sum is made
    in the model's own dtype, because that is the number that the next block goes on with.

    Args:
        output: What the block returned.
        residual: How to read it.
        rows: [K] int64 flat rows to keep, on the output's device; all of them where None.

    Returns:
        [K, D] in the model's dtype, sharing no memory with ``output``.
    """
    if residual is Residual.SUM:
        branch, stream = _flat(output[0], rows), _flat(output[1], rows)
        return branch + stream
    chosen = output if residual is Residual.TENSOR else output[0]
    flat = _flat(chosen, rows)
    return flat.clone() if rows is None else flat


def _flat(tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    flat = tensor.squeeze(0) if tensor.ndim == 3 else tensor  # noqa: PLR2004 ([1, T, D])
    return flat if rows is None else flat.index_select(0, rows)


def settle(
    log: ProbeLog, blocks: dict[str, tuple[nn.Module, ...]], modules: dict[str, nn.Module]
) -> Topology:
    """Decide from an observed pass which list holds the blocks and how to read their output.

    Args:
        log: What :class:`~wllm_ray.capture.probe.Probe` saw in one pass.
        blocks: The candidate lists, from :func:`find_block_lists`.
        modules: Every module of the model by dotted name.

    Raises:
        CaptureError: The structure is not understood (code ``unknown_structure``).
    """
    name = _the_list_that_ran(log, blocks)
    calls = log.block_calls[name]
    _check_structure(name, calls, log)
    norm_call = _find_norm(log, name)
    norm = modules[norm_call.name]
    evidence = _replay(norm, norm_call, calls[-1].output)
    residual = _choose(evidence, calls[-1].output, norm_call)
    _check_chain(name, calls, residual)
    return Topology(name, blocks[name], residual, norm_call.name, norm, evidence)


def _the_list_that_ran(log: ProbeLog, blocks: dict[str, tuple[nn.Module, ...]]) -> str:
    order = {name: [call.index for call in log.block_calls[name]] for name in blocks}
    ran = [name for name, calls in order.items() if calls == list(range(len(blocks[name])))]
    if len(ran) != 1:
        raise _unknown(
            "expected exactly one list whose blocks each run once, in order; calls seen: "
            + "; ".join(f"{name}: {calls}" for name, calls in order.items())
        )
    return ran[0]


def _check_structure(name: str, calls: Sequence[BlockCall], log: ProbeLog) -> None:
    """All blocks return the same thing, and it is one of those that can be read."""
    shapes = {_describe(call.output) for call in calls}
    if len(shapes) != 1:
        raise _unknown(f"the blocks of {name} return different things: {sorted(shapes)}")
    streams = _candidates(calls[-1].output)
    wanted = (log.num_tokens, log.hidden_size)
    fits = all(
        stream.ndim == 2 and tuple(stream.shape) == wanted and stream.is_floating_point()  # noqa: PLR2004
        for stream in streams.values()
    )
    if not streams or not fits:
        raise _unknown(
            f"the blocks of {name} return {shapes.pop()}, expected a tensor or a tuple of tensors "
            f"of {wanted[0]} tokens by {wanted[1]}"
        )


def _describe(output: Any) -> str:
    if isinstance(output, torch.Tensor):
        return f"{output.dtype}{list(output.shape)}".removeprefix("torch.")
    if isinstance(output, (tuple, list)):
        return "(" + ", ".join(_describe(item) for item in output) + ")"
    return type(output).__name__


def _candidates(output: Any) -> dict[Residual, torch.Tensor]:
    """What could be the stream, given what a block returned."""
    if isinstance(output, torch.Tensor):
        return {Residual.TENSOR: read_stream(output, Residual.TENSOR)}
    if not isinstance(output, tuple) or not 1 <= len(output) <= 2:  # noqa: PLR2004
        return {}
    if not isinstance(output[0], torch.Tensor):
        return {}
    first = {Residual.FIRST: read_stream(output, Residual.FIRST)}
    if len(output) == 1 or output[1] is None:
        return first
    if not isinstance(output[1], torch.Tensor) or output[1].shape != output[0].shape:
        return {}
    return first | {Residual.SUM: read_stream(output, Residual.SUM)}


def _find_norm(log: ProbeLog, blocks_name: str) -> ModuleCall:
    """The first module entered after the last block whose output has the stream's width.

    Models that normalise inside their blocks have none; there it is the first module that ran on
    every token, a projection in front of the head, which speaks for the stream just as well.
    """
    after = [
        (call, call.output.shape)
        for call in log.after_blocks[blocks_name]
        if call.output is not None
    ]
    as_wide = [call for call, shape in after if shape[-1] == log.hidden_size]
    on_all = [call for call, shape in after if math.prod(shape[:-1]) == log.num_tokens]
    for call in as_wide or on_all:
        return call
    raise _unknown(
        f"no module with an output of width {log.hidden_size}, or of every token, ran after the "
        f"last block of {blocks_name}; modules seen: {[call.name for call, _ in after]}"
    )


def _replay(norm: nn.Module, call: ModuleCall, output: Any) -> dict[Residual, float]:
    assert call.output is not None
    found: dict[Residual, float] = {}
    for residual, stream in _candidates(output).items():
        batched = stream.unsqueeze(0) if call.output.ndim == 3 else stream  # noqa: PLR2004
        replayed = next(iter(tensors_in(norm(batched))))
        found[residual] = relative_l2(replayed, call.output)
    return found


def relative_l2(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest relative L2 distance over rows; both [..., D]."""
    if found.shape != expected.shape:
        return float("inf")
    distance = (found.double() - expected.double()).norm(dim=-1)
    worst = (distance / expected.double().norm(dim=-1).clamp_min(1e-30)).max().item()
    return float(worst) if worst == worst else float("inf")  # noqa: PLR0124 (NaN)


def _choose(evidence: dict[Residual, float], output: Any, call: ModuleCall) -> Residual:
    assert call.output is not None
    dtype = call.output.dtype
    best = min(evidence, key=lambda residual: evidence[residual])
    seen = ", ".join(f"{residual}: {error:.2e}" for residual, error in evidence.items())
    tight = _TIGHT.get(dtype, 0.0)
    if evidence[best] > tight:
        raise _unknown(
            f"replaying {call.name} on what the last block returned does not reproduce what "
            f"{call.name} returned; relative L2 of each candidate: {seen}; expected at most {tight}"
        )
    noise = 2 * torch.finfo(dtype).eps
    rivals = [
        r for r in evidence if r is not best and evidence[r] <= max(4 * evidence[best], noise)
    ]
    streams = _candidates(output)
    if any(not torch.equal(streams[rival], streams[best]) for rival in rivals):
        raise _unknown(f"several ways to read the stream explain {call.name} equally well: {seen}")
    return best


def _check_chain(name: str, calls: Sequence[BlockCall], residual: Residual) -> None:
    """Each block goes on with exactly what the block before it returned.

    Only the last block's output is settled by the norm; this carries it to the others.
    """
    for before, after in pairwise(calls):
        for part in _parts(before.output, residual):
            if not any(_same(part, given) for given in after.inputs):
                raise _unknown(
                    f"block {after.index} of {name} does not receive what block {before.index} "
                    f"returned ({_describe(before.output)})"
                )


def _parts(output: Any, residual: Residual) -> tuple[torch.Tensor, ...]:
    if residual is Residual.TENSOR:
        return (output,)
    return tuple(output[:2]) if residual is Residual.SUM else (output[0],)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and bool(torch.equal(one, other))


def _unknown(message: str) -> CaptureError:
    return CaptureError(
        f"{message}. This model cannot be captured by this build", code="unknown_structure"
    )

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

from wllm_ray.capture.block_lists import the_list_that_ran, unknown
from wllm_ray.capture.probe import BlockCall, ModuleCall, ProbeLog
from wllm_ray.capture.reading import Part, Path, Place, Side, follow, tensors_in

__all__ = ["Residual", "Topology", "relative_l2", "settle", "stream_of"]

# Largest relative L2 between the replayed norm and what the model's own norm returned. The right
# candidate differs by rounding only; the wrong one has been seen as near as 0.2.
_TIGHT = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 2e-2}


class Residual(StrEnum):
    """How the stream after a block is read off what the block returns."""

    TENSOR = "tensor"
    FIRST = "first element of the tuple"
    SUM = "sum of the tuple's two elements"


# Where the parts of the stream lie in what a block returns.
_PATHS: dict[Residual, tuple[Path, ...]] = {
    Residual.TENSOR: ((),),
    Residual.FIRST: ((0,),),
    Residual.SUM: ((0,), (1,)),
}


@dataclass(frozen=True, slots=True)
class Topology:
    """What was found out about a model's stream.

    Attributes:
        blocks_name: Dotted name of the list of decoder blocks.
        blocks: The blocks, in order.
        residual: How the stream is read off a block's output.
        entry: Where the stream lies in the ``(args, kwargs)`` that block 0 is called with.
        final_norm_name: Dotted name of the module that was replayed: the model's last norm.
        final_norm: That module.
        final_norm_path: Where in its output the normed stream lies.
        has_final_norm: Whether it is a norm of the stream, and not a projection in front of the
            head of a model that normalises inside its blocks.
        head_factor: What the model multiplies that module's output by before its head is given it.
        evidence: Relative L2 of the replayed final norm, for each candidate.
    """

    blocks_name: str
    blocks: tuple[nn.Module, ...]
    residual: Residual
    entry: tuple[Path, ...]
    final_norm_name: str
    final_norm: nn.Module
    final_norm_path: Path
    has_final_norm: bool
    head_factor: float
    evidence: dict[Residual, float]

    def parts_after(self, layer: int) -> tuple[Part, ...]:
        """What the stream after a block is made of."""
        place = Place(self.blocks[layer], f"{self.blocks_name}.{layer}", Side.OUTPUT)
        return tuple(Part(place, path) for path in _PATHS[self.residual])

    def parts_before(self) -> tuple[Part, ...]:
        """What the stream that enters block 0 is made of."""
        place = Place(self.blocks[0], f"{self.blocks_name}.0", Side.INPUT)
        return tuple(Part(place, path) for path in self.entry)

    def describe(self) -> str:
        """How the stream is read and what speaks for it, in one line."""
        seen = ", ".join(f"{kind} {error:.1e}" for kind, error in self.evidence.items())
        return (
            f"{self.residual} of {self.blocks_name}; {self.final_norm_name} replayed on each "
            f"candidate, relative L2: {seen}"
        )


def stream_of(output: Any, residual: Residual) -> torch.Tensor:
    """[T, D]: the whole stream after a block.

    A sum is made in the model's own dtype, because that is the number that the next block goes on
    with.
    """
    first, *rest = (_flat(follow(output, path)) for path in _PATHS[residual])
    return first + rest[0] if rest else first


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.squeeze(0) if tensor.ndim == 3 else tensor  # noqa: PLR2004 ([1, T, D])


def settle(
    log: ProbeLog, blocks: dict[str, tuple[nn.Module, ...]], modules: dict[str, nn.Module]
) -> Topology:
    """Decide from an observed pass which list holds the blocks and how to read their output.

    Args:
        log: What :class:`~wllm_ray.capture.probe.Probe` saw in one pass.
        blocks: The candidate lists, from :func:`.block_lists.find_block_lists`.
        modules: Every module of the model by dotted name.

    Raises:
        CaptureError: The structure is not understood (code ``unknown_structure``).
    """
    name = the_list_that_ran(log, blocks)
    calls = log.block_calls[name]
    _check_structure(name, calls, log)
    norm_call, is_norm = _find_norm(log, name)
    norm = modules[norm_call.name]
    evidence = _replay(norm, norm_call, calls[-1].output)
    residual = _choose(evidence, calls[-1].output, norm_call)
    entry = _follow_chain(name, calls, residual)
    return Topology(
        blocks_name=name,
        blocks=blocks[name],
        residual=residual,
        entry=entry,
        final_norm_name=norm_call.name,
        final_norm=norm,
        final_norm_path=norm_call.path,
        has_final_norm=is_norm,
        head_factor=_factor(norm_call.output, log.returned),
        evidence=evidence,
    )


def _check_structure(name: str, calls: Sequence[BlockCall], log: ProbeLog) -> None:
    """All blocks return the same thing, and it is one of those that can be read."""
    shapes = {_describe(call.output) for call in calls}
    if len(shapes) != 1:
        raise unknown(f"the blocks of {name} return different things: {sorted(shapes)}")
    streams = _candidates(calls[-1].output)
    wanted = (log.num_tokens, log.hidden_size)
    fits = all(
        stream.ndim == 2 and tuple(stream.shape) == wanted and stream.is_floating_point()  # noqa: PLR2004
        for stream in streams.values()
    )
    if not streams or not fits:
        raise unknown(
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
        return {Residual.TENSOR: stream_of(output, Residual.TENSOR)}
    if not isinstance(output, tuple) or not 1 <= len(output) <= 2:  # noqa: PLR2004
        return {}
    if not isinstance(output[0], torch.Tensor):
        return {}
    first = {Residual.FIRST: stream_of(output, Residual.FIRST)}
    if len(output) == 1 or output[1] is None:
        return first
    if not isinstance(output[1], torch.Tensor):
        return {}
    if output[1].shape != output[0].shape:
        # Attention weights, which some models of Transformers return beside the stream.
        return first
    return first | {Residual.SUM: stream_of(output, Residual.SUM)}


def _find_norm(log: ProbeLog, blocks_name: str) -> tuple[ModuleCall, bool]:
    """The first module entered after the last block whose output has the stream's width.

    Models that normalise inside their blocks have none; there it is the first module that ran on
    every token, a projection in front of the head, which speaks for the stream just as well. A
    module that returns its input (a dropout that is off) says nothing.
    """
    after = [
        (call, call.output.shape)
        for call in log.after_blocks[blocks_name]
        if call.output is not None and not call.unchanged
    ]
    as_wide = [call for call, shape in after if shape[-1] == log.hidden_size]
    on_all = [call for call, shape in after if math.prod(shape[:-1]) == log.num_tokens]
    for call in as_wide or on_all:
        return call, bool(as_wide)
    raise unknown(
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


def _factor(normed: torch.Tensor | None, returned: torch.Tensor | None) -> float:
    """The constant between two tensors; 1 where there is none (MiniCPM divides by a width)."""
    if normed is None or returned is None or normed.numel() != returned.numel():
        return 1.0
    one, other = normed.double().flatten(), returned.double().flatten()
    factor = float(one @ other / (one @ one).clamp_min(1e-30))
    off = float((one * factor - other).norm() / other.norm().clamp_min(1e-30))
    return factor if off <= _TIGHT.get(normed.dtype, 0.0) else 1.0


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
        raise unknown(
            f"replaying {call.name} on what the last block returned does not reproduce what "
            f"{call.name} returned; relative L2 of each candidate: {seen}; expected at most {tight}"
        )
    noise = 2 * torch.finfo(dtype).eps
    rivals = [
        r for r in evidence if r is not best and evidence[r] <= max(4 * evidence[best], noise)
    ]
    streams = _candidates(output)
    if any(not torch.equal(streams[rival], streams[best]) for rival in rivals):
        raise unknown(f"several ways to read the stream explain {call.name} equally well: {seen}")
    return best


def _follow_chain(name: str, calls: Sequence[BlockCall], residual: Residual) -> tuple[Path, ...]:
    """Each block goes on with exactly what the block before it returned.

    Only the last block's output is settled by the norm; this carries it to the others. Returns
    where the stream lies in what block 0 is given: the places where later blocks are given it.
    """
    paths = _PATHS[residual]
    places: tuple[Path, ...] = ()
    for before, after in pairwise(calls):
        found = [_find(before.outputs[path], after) for path in paths]
        if any(place is None for place in found):
            raise unknown(
                f"block {after.index} of {name} does not receive what block {before.index} "
                f"returned ({_describe(before.output)})"
            )
        places = places or tuple(place for place in found if place is not None)
    entering = calls[0].inputs
    entry = tuple(place for place in places if place in entering)
    if not entry:
        wide = calls[-1].outputs[paths[0]].shape
        entry = tuple(path for path, tensor in entering.items() if tensor.shape == wide)[:1]
    if not entry:
        raise unknown(f"block 0 of {name} is given no stream; inputs: {list(entering)}")
    return entry


def _find(value: torch.Tensor, call: BlockCall) -> Path | None:
    """Where a block is given exactly this."""
    return next((path for path, given in call.inputs.items() if _same(value, given)), None)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and bool(torch.equal(one, other))

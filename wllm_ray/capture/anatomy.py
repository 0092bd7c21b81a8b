"""Every hook site of a model and how it is read, from one observed pass.

Which outputs were added to the stream is arithmetic (:mod:`wllm_ray.capture.branches`); which of
them is attention, a mixer or the feed-forward is in their names (:mod:`wllm_ray.capture.kinds`). A
block that no sum explains offers its stream alone. The identities that this rests on are those of
the sites::

    resid_pre + attn_out = resid_mid      resid_mid + mlp_out = resid_post
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch
from torch import nn

from wllm_ray.capture.branches import (
    EXACT_SHARE,
    Block,
    Branch,
    add_up,
    exactness,
    explain,
    find_branches,
    same,
)
from wllm_ray.capture.kinds import Kind, block_type, classify, only_shapes
from wllm_ray.capture.probe import Event, ProbeLog
from wllm_ray.capture.reading import Part, Place, Reading, Side
from wllm_ray.capture.topology import Topology
from wllm_ray.sites import HookSite

__all__ = ["Anatomy", "dissect"]


@dataclass(frozen=True, slots=True)
class Anatomy:
    """Every site that can be read, and how.

    Attributes:
        readings: Site → how it is read, sites in the order of the blocks.
        block_types: What each block is made of.
        unexplained: Blocks whose sum could not be settled; they offer their stream alone.
    """

    readings: dict[HookSite, Reading]
    block_types: tuple[str, ...]
    unexplained: tuple[int, ...]

    def without(self, refused: Collection[HookSite]) -> Anatomy:
        """The same without some sites."""
        kept = {site: one for site, one in self.readings.items() if site not in refused}
        return replace(self, readings=kept)


def dissect(log: ProbeLog, topology: Topology) -> Anatomy:
    """Find every site of every block in an observed pass.

    Args:
        log: What :class:`~wllm_ray.capture.probe.Probe` saw in one pass.
        topology: Where the stream is, settled before.
    """
    calls = log.block_calls[topology.blocks_name]
    width = calls[-1].outputs[topology.parts_after(0)[0].path].shape[-1]
    readings: dict[HookSite, Reading] = {
        HookSite(None, "embed"): Reading(topology.parts_before(), width, -1)
    }
    entering = add_up([calls[0].inputs[part.path] for part in topology.parts_before()])
    unexplained = []
    for layer, call in enumerate(calls):
        leaving = add_up([call.outputs[part.path] for part in topology.parts_after(layer)])
        block = Block(
            layer, f"{topology.blocks_name}.{layer}", call, entering.to(leaving.dtype), leaving
        )
        # A module that ran more than once in the pass belongs to no single place.
        block.events = [event for event in call.events if log.times[event.module] == 1]
        before = topology.parts_before() if layer == 0 else topology.parts_after(layer - 1)
        found = _dissect_block(block)
        if not found:
            unexplained.append(layer)
        readings[HookSite(layer, "resid_pre")] = Reading(before, width, layer - 1)
        readings |= {HookSite(layer, kind): reading for kind, reading in found.items()}
        readings[HookSite(layer, "resid_post")] = Reading(topology.parts_after(layer), width, layer)
        entering = leaving
    if topology.has_final_norm:
        readings[HookSite(None, "final_norm")] = _final_norm(topology, width)
    types = tuple(_type(readings, *numbered) for numbered in enumerate(topology.blocks))
    return Anatomy(readings, types, tuple(unexplained))


def _type(readings: dict[HookSite, Reading], layer: int, block: nn.Module) -> str:
    """What a block is made of, and whether its branches run side by side."""
    offered = {site.kind for site in readings if site.layer == layer}
    both = "mlp_out" in offered and offered & {"attn_out", "mamba_out", "mixer_out"}
    beside = " side by side" if both and "resid_mid" not in offered else ""
    return block_type(block) + beside


def _final_norm(topology: Topology, width: int) -> Reading:
    place = Place(topology.final_norm, topology.final_norm_name, Side.OUTPUT)
    part = Part(place, topology.final_norm_path)
    return Reading((part,), width, len(topology.blocks))


def _dissect_block(block: Block) -> dict[str, Reading]:
    """Site kind → reading, for what is inside one block."""
    branches = find_branches(block)
    chosen = explain(block, branches)
    found: dict[str, Reading] = {}
    if chosen is None:
        chosen = _first_half(block, branches)
    kinds = {id(branch): _kind_of(block, branch) for branch in chosen}
    mixers = [branch for branch in chosen if kinds[id(branch)].mixes]
    forward = [branch for branch in chosen if not kinds[id(branch)].mixes]
    for kind, names in _SITES.items():
        of_kind = [branch for branch in chosen if kinds[id(branch)] is kind]
        if of_kind:
            found |= dict.fromkeys(names, _reading(block, of_kind))
    if forward:
        found["mlp_out"] = _reading(block, forward)
        if any(kinds[id(branch)] is Kind.MOE for branch in forward):
            found["moe_out"] = found["mlp_out"]
    # Blocks with one branch alone have no middle: what it is added to is the stream after.
    has_middle = mixers and (forward or exactness(block, mixers) < EXACT_SHARE)
    if has_middle and (middle := _find_middle(block, mixers)):
        found["resid_mid"] = middle
    attention = [branch for branch in mixers if kinds[id(branch)] is Kind.ATTENTION]
    if len(attention) == 1 and (before := _before_projection(block, attention[0])):
        found["attn_out_prelinear"] = before
    return found


_SITES: dict[Kind, tuple[str, ...]] = {
    Kind.ATTENTION: ("attn_out",),
    Kind.MAMBA: ("mamba_out", "mixer_out"),
    Kind.MIXER: ("mixer_out",),
}


def _first_half(block: Block, branches: Sequence[Branch]) -> list[Branch]:
    """Where the whole block is not explained: a mixer alone, if a module goes on with that sum."""
    factors: list[float | None] = [None, *sorted(block.call.factors)]
    for one in branches:
        for factor in factors:
            branch = Branch(one.event, one.path, one.value, factor, one.bias)
            if _kind_of(block, branch).mixes and _find_middle(block, [branch]):
                return [branch]
    return []


def _find_middle(block: Block, mixers: Sequence[Branch]) -> Reading | None:
    """Where the stream after the mixers can be read: a module goes on with it."""
    wanted = [add_up([block.before, *(branch.added for branch in mixers)])]
    wanted += [block.before + add_up([branch.added for branch in mixers])]
    ended = max(branch.event.ended for branch in mixers)
    width = block.after.shape[-1]
    for event in sorted(block.events, key=lambda one: (one.began, one.name.count("."))):
        if event.began < ended:
            continue
        for side, tensors in ((Side.OUTPUT, event.outputs), (Side.INPUT, event.inputs)):
            for path, value in tensors.items():
                if any(_alike(value, middle) for middle in wanted):
                    return Reading((Part(_place(block, event, side), path),), width, block.layer)
        for one, other in combinations(event.inputs, 2):
            pair = event.inputs[one], event.inputs[other]
            if pair[0].shape == pair[1].shape and any(_alike(add_up(pair), m) for m in wanted):
                place = _place(block, event, Side.INPUT)
                return Reading((Part(place, one), Part(place, other)), width, block.layer)
    return None


def _before_projection(block: Block, attention: Branch) -> Reading | None:
    """The input of the matrix whose output is what the attention module returned."""
    source = _source(block, attention.event)
    inner = [event for event in block.events if event.name.startswith(f"{source.name}.")]
    if isinstance(source.module, nn.Linear):
        # BLOOM's attention returns the stream with the branch in it; the branch is its last layer.
        inner = [source]
    for event in sorted(inner, key=lambda one: -one.ended):
        if list(event.module.children()) or only_shapes(event.module) or not event.inputs:
            continue
        returned = source.outputs.values()
        if any(same(value, other) for value in event.outputs.values() for other in returned):
            path, value = next(iter(event.inputs.items()))
            part = Part(_place(block, event, Side.INPUT), path)
            return Reading((part,), value.shape[-1], block.layer)
    return None


def _kind_of(block: Block, branch: Branch) -> Kind:
    source = _source(block, branch.event)
    return classify(source.name, source.module)


def _source(block: Block, event: Event) -> Event:
    """The module that computed a branch: norms and dropouts that follow it are passed over."""
    while only_shapes(event.module):
        given = list(event.inputs.values())
        earlier = [
            one
            for one in block.events
            if one.ended < event.began
            and any(same(value, mine) for value in one.outputs.values() for mine in given)
        ]
        if not earlier:
            return event
        event = min(earlier, key=lambda one: (one.name.count("."), -one.ended))
    return event


def _reading(block: Block, branches: Sequence[Branch]) -> Reading:
    """Branches of one kind as one reading; they have one factor, or none."""
    parts = []
    for branch in branches:
        place = _place(block, branch.event, Side.OUTPUT)
        parts.append(Part(place, branch.path))
        if branch.bias is not None:
            parts.append(Part(place, branch.bias))
    width = block.after.shape[-1]
    return Reading(tuple(parts), width, block.layer, branches[0].factor)


def _place(block: Block, event: Event, side: Side) -> Place:
    return Place(event.module, f"{block.name}.{event.name}", side)


def _alike(value: torch.Tensor, wanted: torch.Tensor) -> bool:
    if value.shape != wanted.shape or value.dtype != wanted.dtype:
        return False
    return float((value == wanted).double().mean()) >= EXACT_SHARE

"""The sites inside decoder blocks: which branch is which, and where each is read.

A block speaks for itself where what is added to its stream is certain. Where it is not (a pruned
feed-forward adds zeros, a huge stream swallows its branches in rounding), a block that is built in
the same way speaks for it, as long as the sum holds there too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import nn

from wllm_ray.capture.branches import (
    EXACT_SHARE,
    Block,
    Branch,
    add_up,
    exactness,
    explain,
    explains,
    find_branches,
    same,
)
from wllm_ray.capture.kinds import Kind, classify, only_shapes
from wllm_ray.capture.probe import Event
from wllm_ray.capture.reading import Part, Place, Reading, Side

__all__ = ["settle_blocks"]

# Site kind → how it is read.
Sites: TypeAlias = dict[str, Reading]


def settle_blocks(blocks: Sequence[Block]) -> list[Sites]:
    """Site kind → reading for each block; empty where nothing but the stream can be told."""
    branches = [find_branches(block) for block in blocks]
    whole = [explain(block, found) for block, found in zip(blocks, branches, strict=True)]
    own = [
        _sites(block, chosen or _first_half(block, found))
        for block, chosen, found in zip(blocks, whole, branches, strict=True)
    ]
    return [_richest(blocks, whole, own, number) for number in range(len(blocks))]


def _richest(
    blocks: Sequence[Block],
    whole: Sequence[list[Branch] | None],
    own: Sequence[Sites],
    number: int,
) -> Sites:
    """What the block tells itself, or what another of its build tells more of, if it holds here."""
    block, found = blocks[number], own[number]
    build = _build(block)
    for other in sorted(range(len(blocks)), key=lambda one: -len(own[one])):
        chosen = whole[other]
        if len(own[other]) <= len(found) or chosen is None or _build(blocks[other]) != build:
            continue
        moved = _moved(chosen, block)
        if moved is not None and explains(block, moved):
            readings = {
                kind: _moved_reading(reading, blocks[other], block)
                for kind, reading in own[other].items()
            }
            return {kind: reading for kind, reading in readings.items() if reading is not None}
    return found


def _build(block: Block) -> tuple[object, ...]:
    """A block's class, the modules of it that ran, in order, and its constants."""
    parts = [event for event in block.events if "." not in event.name]
    ordered = sorted(parts, key=lambda event: event.began)
    modules = tuple((event.name, type(event.module).__name__) for event in ordered)
    return block.made_as, modules, tuple(sorted(block.call.factors))


def _moved(branches: Sequence[Branch], block: Block) -> list[Branch] | None:
    """The same branches in another block."""
    events = {event.name: event for event in block.events}
    moved = []
    for branch in branches:
        event = events.get(branch.event.name)
        if event is None or branch.path not in event.outputs:
            return None
        value = event.outputs[branch.path]
        if branch.bias is not None:
            if branch.bias not in event.outputs:
                return None
            value = value + event.outputs[branch.bias]
        moved.append(Branch(event, branch.path, value, branch.factor, branch.bias))
    return moved


def _moved_reading(reading: Reading, source: Block, block: Block) -> Reading | None:
    """The same reading in another block, as wide as what was seen there; None where it is not."""
    events = {event.name: event for event in block.events}
    parts, width = [], 0
    for part in reading.parts:
        event = events.get(part.place.name.removeprefix(f"{source.name}."))
        if event is None:
            return None
        tensors = event.inputs if part.place.side is Side.INPUT else event.outputs
        if part.path not in tensors:
            return None
        width = width or tensors[part.path].shape[-1]
        parts.append(Part(_place(block, event, part.place.side), part.path))
    return replace(reading, parts=tuple(parts), width=width, depth=block.layer)


def _sites(block: Block, chosen: Sequence[Branch]) -> Sites:
    """Site kind → reading, from what is added inside one block."""
    found: Sites = {}
    kinds = {id(branch): _kind_of(block, branch) for branch in chosen}
    if Kind.UNKNOWN in kinds.values():
        return {}
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
            middle = block.before + branch.added
            # A sum that is the stream before says nothing of what was added.
            if _alike(middle, block.before) or not _kind_of(block, branch).mixes:
                continue
            if _find_middle(block, [branch]):
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
    return None


def _before_projection(block: Block, attention: Branch) -> Reading | None:
    """The input of the matrix whose output is the branch, before any norm that follows."""
    source, branch = _source(block, attention)
    inner = [event for event in block.events if event.name.startswith(f"{source.name}.")]
    if isinstance(source.module, nn.Linear):
        # BLOOM's attention returns the stream with the branch in it; the branch is its last layer.
        inner = [source]
    for event in sorted(inner, key=lambda one: -one.ended):
        if list(event.module.children()) or only_shapes(event.module) or not event.inputs:
            continue
        if any(same(value, branch) for value in event.outputs.values()):
            path, value = next(iter(event.inputs.items()))
            part = Part(_place(block, event, Side.INPUT), path)
            return Reading((part,), value.shape[-1], block.layer)
    return None


def _kind_of(block: Block, branch: Branch) -> Kind:
    source, _ = _source(block, branch)
    return classify(source.name, source.module)


def _source(block: Block, branch: Branch) -> tuple[Event, torch.Tensor]:
    """The module that computed a branch, and what it returned before norms and dropouts."""
    event, value = branch.event, branch.event.outputs[branch.path]
    while only_shapes(event.module):
        given = list(event.inputs.values())
        earlier = [
            (one, returned)
            for one in block.events
            for returned in one.outputs.values()
            if one.ended < event.began and any(same(returned, mine) for mine in given)
        ]
        if not earlier:
            break
        event, value = min(earlier, key=lambda one: (one[0].name.count("."), -one[0].ended))
    return event, value


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

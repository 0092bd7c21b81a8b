"""Every hook site of a model and how it is read, from one observed pass.

Which outputs were added to the stream is arithmetic (:mod:`wllm_ray.capture.branches`); which of
them is attention, a mixer or the feed-forward is in their names (:mod:`wllm_ray.capture.kinds`). A
block that no sum explains offers its stream alone. The identities that this rests on are those of
the sites::

    resid_pre + attn_out = resid_mid      resid_mid + mlp_out = resid_post
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from torch import nn

from wllm_ray.capture.block_sites import settle_blocks
from wllm_ray.capture.branches import Block, add_up
from wllm_ray.capture.kinds import block_type
from wllm_ray.capture.probe import ProbeLog
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
    blocks = list(_blocks(log, topology))
    inside = settle_blocks(blocks)
    for block, found in zip(blocks, inside, strict=True):
        layer = block.layer
        before = topology.parts_before() if layer == 0 else topology.parts_after(layer - 1)
        readings[HookSite(layer, "resid_pre")] = Reading(before, width, layer - 1)
        readings |= {HookSite(layer, kind): reading for kind, reading in found.items()}
        readings[HookSite(layer, "resid_post")] = Reading(topology.parts_after(layer), width, layer)
    if topology.has_final_norm and log.times[topology.final_norm] == 1:
        readings[HookSite(None, "final_norm")] = _final_norm(topology, width)
    types = tuple(_type(readings, *numbered) for numbered in enumerate(topology.blocks))
    return Anatomy(readings, types, tuple(n for n, found in enumerate(inside) if not found))


def _blocks(log: ProbeLog, topology: Topology) -> Iterator[Block]:
    """The evidence of each block."""
    calls = log.block_calls[topology.blocks_name]
    entering = add_up([calls[0].inputs[part.path] for part in topology.parts_before()])
    for layer, call in enumerate(calls):
        leaving = add_up([call.outputs[part.path] for part in topology.parts_after(layer)])
        block = Block(
            layer, f"{topology.blocks_name}.{layer}", call, entering.to(leaving.dtype), leaving
        )
        block.made_as = type(topology.blocks[layer]).__name__
        # A module that ran more than once in the pass belongs to no single place.
        block.events = [event for event in call.events if log.times[event.module] == 1]
        yield block
        entering = leaving


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

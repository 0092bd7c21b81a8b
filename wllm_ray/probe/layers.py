"""Where hook sites stand on an axis of layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wllm_ray.sites import HookSite

__all__ = ["label_layers", "layer_places"]

_MOST_TICKS = 36


def layer_places(sites: Sequence[HookSite]) -> dict[str, float]:
    """Site name → its layer; the sites that belong to no block lie at the ends."""
    last = max((site.layer for site in sites if site.layer is not None), default=0)
    ends = {"embed": -1.0, "final_norm": last + 1.0}
    return {
        str(site): ends[site.kind] if site.layer is None else float(site.layer) for site in sites
    }


def label_layers(axes: Any, places: Mapping[str, float]) -> None:
    """Name the ticks of a horizontal axis of layers; of very many, every few of them."""
    layers = sorted({int(place) for place in places.values()})
    every = -(-len(layers) // _MOST_TICKS)
    names = {layer: str(layer) for layer in layers[::every]}
    names |= {int(places[end]): end for end in ("embed", "final_norm") if end in places}
    axes.set_xticks(list(names), list(names.values()))
    axes.set_xlabel("layer (zero-based decoder block)")

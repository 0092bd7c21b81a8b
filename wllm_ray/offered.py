"""Which hook sites a served model offers, and how wide each is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from wllm_ray.errors import InvalidInputError, NotOfferedError
from wllm_ray.records import SiteSupport
from wllm_ray.sites import HookSite

__all__ = ["Offers", "offered_kinds", "offered_sites", "site_widths"]


class Offers(Protocol):
    """What a replica says of its sites, or what a client was told of them."""

    @property
    def architecture(self) -> str:
        """The model's class."""

    @property
    def layer_types(self) -> tuple[str, ...]:
        """For each decoder block, what it is made of: ``attention + mlp``."""

    @property
    def sites(self) -> tuple[SiteSupport, ...]:
        """Kinds, the layers that have them, and their widths."""


def offered_kinds(offers: Offers) -> tuple[str, ...]:
    """Site kinds that at least one block offers, each once."""
    return tuple(dict.fromkeys(support.kind for support in offers.sites))


def offered_sites(offers: Offers) -> tuple[HookSite, ...]:
    """Every single site, kind by kind, layers ascending."""
    pairs = [
        (kind, layer)
        for kind in offered_kinds(offers)
        for layer in sorted(
            layer for one in offers.sites if one.kind == kind for layer in one.layers or (-1,)
        )
    ]
    return tuple(HookSite(None if layer < 0 else layer, kind) for kind, layer in pairs)


def site_widths(offers: Offers, sites: Iterable[HookSite]) -> tuple[int, ...]:
    """The width of each site, in the order given.

    Raises:
        InvalidInputError: A layer that the model does not have (``layer_out_of_range``).
        NotOfferedError: A site that this model does not have or that is not captured on it
            (``site_not_offered``); the message names the layer and its type.
    """
    widths = {
        (one.kind, layer): one.width for one in offers.sites for layer in one.layers or (None,)
    }
    return tuple(_width(offers, widths, site) for site in sites)


def _width(offers: Offers, widths: dict[tuple[str, int | None], int], site: HookSite) -> int:
    if (site.kind, site.layer) in widths:
        return widths[site.kind, site.layer]
    blocks = len(offers.layer_types)
    if site.layer is not None and site.layer >= blocks:
        raise InvalidInputError(
            f"layer {site.layer} does not exist: the model has {blocks} blocks, numbered 0 to "
            f"{blocks - 1}",
            code="layer_out_of_range",
        )
    kinds = offered_kinds(offers)
    if site.kind not in kinds or site.layer is None:
        made = "" if site.layer is None else f", whose block {site.layer} is "
        made += "" if site.layer is None else repr(offers.layer_types[site.layer])
        raise NotOfferedError(
            f"hook site {site} is not offered on {offers.architecture}{made}; offered kinds: "
            f"{', '.join(kinds)}",
            code="site_not_offered",
        )
    has = [str(layer) for kind, layer in widths if kind == site.kind]
    here = [kind for kind, layer in widths if layer == site.layer]
    raise NotOfferedError(
        f"hook site {site} does not exist: block {site.layer} of {offers.architecture} is "
        f"{offers.layer_types[site.layer]!r} and offers {', '.join(here)}; blocks with "
        f"{site.kind}: {', '.join(has)}",
        code="site_not_offered",
    )

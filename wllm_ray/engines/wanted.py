"""What a caller wants to read, before and after it is known what the model has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from wllm_ray.errors import InvalidInputError
from wllm_ray.positions import PositionLike, canonical_position
from wllm_ray.records import EngineDescription
from wllm_ray.requests import Selection, select
from wllm_ray.sites import HookSite, parse_site

__all__ = ["Sites", "Wanted", "site_names"]

# Names or aliases of hook sites, hook sites, or one of them.
Sites: TypeAlias = str | HookSite | Iterable[str | HookSite]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Sites and a position as they were asked for; what cannot be read is refused at once.

    Attributes:
        sites: By name, or None.
        position: As asked.
        layers: Zero-based blocks that ``site`` applies to, or None; without them and without
            ``sites``, the last block is meant.
        site: A site kind; ``block`` is ``resid_post``.

    Raises:
        InvalidInputError: A site or position that no model has.
    """

    sites: list[str] | None
    position: PositionLike
    layers: list[int] | None = None
    site: str = "block"

    def __post_init__(self) -> None:
        canonical_position(self.position)
        for name in self.sites or ():
            parse_site(name)

    def on(self, served: EngineDescription) -> Selection:
        """Resolved on a model.

        Raises:
            InvalidInputError: A layer that it does not have, a site listed twice, or none.
            NotOfferedError: A site or position that is not captured on it.
        """
        layers = self.layers
        if layers is None and self.sites is None:
            layers = [served.num_layers - 1]
        return select(
            served, layers=layers, site=self.site, sites=self.sites, position=self.position
        )


def site_names(sites: Sites | None) -> list[str] | None:
    """Names of sites, however they are given.

    Raises:
        InvalidInputError: Neither sites nor one of them.
    """
    if sites is None or isinstance(sites, (str, HookSite)):
        return None if sites is None else [str(sites)]
    try:
        return [str(one) for one in sites]
    except TypeError:
        raise InvalidInputError(
            f"`sites` is a list of hook sites, or one of them; found {sites!a:.80}",
            code="invalid_site",
        ) from None

"""Find a dataset's site by any accepted spelling of its name."""

from __future__ import annotations

from collections.abc import Sequence

from wllm_ray.dataset.format.manifest import Manifest
from wllm_ray.errors import InvalidInputError
from wllm_ray.sites import HookSite, parse_site

__all__ = ["listed", "site_number"]

# A longer list is cut to the first few of it.
_LONGEST_LIST, _FIRST_FEW = 8, 4


def listed(of_sites: Sequence[object]) -> str:
    """Names or widths of sites, for people: all of a few, or the first ones, the last and how many.

    For example ``L0_resid_post, L1_resid_post, … L25_resid_post (26 sites)``.
    """
    shown = [str(one) for one in of_sites]
    if len(shown) <= _LONGEST_LIST:
        return ", ".join(shown)
    return f"{', '.join(shown[:_FIRST_FEW])}, … {shown[-1]} ({len(shown)} sites)"


def site_number(manifest: Manifest, site: HookSite | str) -> int:
    """Which of the dataset's sites this is, counted from 0.

    Raises:
        InvalidInputError: Not a site, or not one of this dataset (``invalid_site``).
    """
    name = _canonical(manifest, site)
    if name not in manifest.sites:
        raise InvalidInputError(
            f"dataset {manifest.dataset_id!r} does not have site {name}; it has "
            f"{listed(manifest.sites)}",
            code="invalid_site",
        )
    return manifest.sites.index(name)


def _canonical(manifest: Manifest, site: HookSite | str) -> str:
    """The canonical name of a site; what is none is refused with what could be written."""
    has = f"dataset {manifest.dataset_id!r} has {listed(manifest.sites)}"
    if isinstance(site, HookSite):
        return str(site)
    if isinstance(site, str):
        try:
            return str(parse_site(site))
        except InvalidInputError as error:
            raise InvalidInputError(f"{error.message}; {has}", code=error.code) from None
    of_layer = [one for one in manifest.sites if one.startswith(f"L{site}_")]
    example = (of_layer or manifest.sites)[0]
    raise InvalidInputError(
        f"a hook site is a name or a HookSite, found {site!r}; write for example "
        f"{example!r}; {has}",
        code="invalid_site",
    )

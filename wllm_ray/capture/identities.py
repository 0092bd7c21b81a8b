"""The identities that sites obey, checked on what was captured.

::

    resid_pre(k + 1) = resid_post(k)
    resid_pre + attn_out (+ mamba_out, mixer_out) = resid_mid
    resid_mid + mlp_out = resid_post

Blocks with one branch, and blocks whose branches run side by side, have no ``resid_mid``: there
``resid_pre`` and all branches give ``resid_post``. Sums are made in the model's dtype, as the model
makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import torch
from numpy.typing import NDArray

from wllm_ray.capture.branches import add_up, off_by_rounding
from wllm_ray.sites import HookSite

__all__ = ["Finding", "check_block", "check_stream", "refused_sites"]

Floats = NDArray[np.float32]

# Of all numbers, how many must come out to the bit; else all must be off by rounding alone, as
# where a model adds up in an order of its own.
_EXACT_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Finding:
    """One identity of one block.

    Attributes:
        text: The identity.
        holds: Whether it holds.
        off: Relative L2 distance of the worst row.
        sites: The sites that it speaks for.
    """

    text: str
    holds: bool
    off: float
    sites: tuple[HookSite, ...]


def check_block(
    layer: int, offered: Sequence[str], values: Callable[[HookSite], Floats], dtype: torch.dtype
) -> list[Finding]:
    """Check what the sites of one block must add up to.

    Args:
        layer: The block.
        offered: The kinds that are captured there.
        values: Site → [rows, hidden] float32.
        dtype: The model's.
    """

    def check(start: str, branches: Sequence[str], end: str) -> Finding:
        sites = [HookSite(layer, kind) for kind in (start, *branches, end)]
        found = [torch.from_numpy(values(site)) for site in sites]
        # Some models keep their stream in float32 whatever the dtype of their branches.
        sums = [_check_sum([value.to(kept) for value in found]) for kept in (dtype, torch.float32)]
        holds, off = next((one for one in sums if one[0]), sums[0])
        text = f"{' + '.join(map(str, sites[:-1]))} = {sites[-1]}"
        return Finding(text, holds, off, tuple(sites))

    mixers = [kind for kind in ("attn_out", "mamba_out") if kind in offered]
    if "mixer_out" in offered and "mamba_out" not in offered:
        mixers.append("mixer_out")
    forward = [kind for kind in ("mlp_out",) if kind in offered]
    if "resid_mid" not in offered:
        return [check("resid_pre", mixers + forward, "resid_post")] if mixers + forward else []
    findings = [check("resid_pre", mixers, "resid_mid")]
    if forward:
        findings.append(check("resid_mid", forward, "resid_post"))
    return findings


def check_stream(before: Floats, after: Floats) -> bool:
    """Whether a block goes on with exactly what the one before it left; both [rows, hidden]."""
    return bool(np.array_equal(before, after))


def refused_sites(
    findings: Sequence[Finding], readable: Iterable[HookSite], num_layers: int
) -> frozenset[HookSite]:
    """The sites that a broken identity leaves in doubt, and what belongs to them.

    The stream between two blocks is in doubt only where nothing vouches for it: no identity that
    holds, on either side. The stream after the last block has been proven by the logits.

    Args:
        findings: Those of all blocks.
        readable: Every site that can be read.
        num_layers: Decoder blocks.
    """
    broken = {site for finding in findings if not finding.holds for site in finding.sites}
    holding = {site for finding in findings if finding.holds for site in finding.sites}
    vouched = {_border(site) for site in holding} | {num_layers, None}
    doubtful = {_border(site) for site in broken} - vouched
    refused = {site for site in broken if _border(site) is None}
    for site in readable:
        source = {"moe_out": "mlp_out", "attn_out_prelinear": "attn_out"}.get(site.kind)
        if _border(site) in doubtful or (source and HookSite(site.layer, source) in refused):
            refused.add(site)
    return frozenset(refused)


def _border(site: HookSite) -> int | None:
    """The block that goes on with the stream at this site; None where it is not the stream."""
    if site.kind == "embed":
        return 0
    if site.layer is None or site.kind not in ("resid_pre", "resid_post"):
        return None
    return site.layer + (site.kind == "resid_post")


def _check_sum(values: Sequence[torch.Tensor]) -> tuple[bool, float]:
    """Whether the last is the sum of the others; relative L2 distance of the worst row."""
    *terms, last = values
    total = _best_sum(terms[0], terms[1:], last)
    share = float((total == last).double().mean())
    return share >= _EXACT_SHARE or off_by_rounding(total, last, terms), _off(total, last)


def _best_sum(
    first: torch.Tensor, added: Sequence[torch.Tensor], last: torch.Tensor
) -> torch.Tensor:
    """The sum in the order of addition that comes nearest."""
    sums = [] if added else [first]
    for order in permutations(added) if added else ():
        sums += [add_up([first, *order]), first + add_up(order)]
    return max(sums, key=lambda total: float((total == last).double().mean()))


def _off(total: torch.Tensor, last: torch.Tensor) -> float:
    """Relative L2 distance of the worst row."""
    distance = (total.double() - last.double()).norm(dim=-1)
    return float((distance / last.double().norm(dim=-1).clamp_min(1e-30)).max())

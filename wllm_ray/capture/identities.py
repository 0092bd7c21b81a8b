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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import torch
from numpy.typing import NDArray

from wllm_ray.sites import HookSite

__all__ = ["Finding", "check_block", "check_stream"]

Floats = NDArray[np.float32]

# Of all numbers, how many must come out to the bit; the rest may differ by the order of addition.
_EXACT_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Finding:
    """One identity of one block.

    Attributes:
        text: The identity.
        holds: Whether it holds.
        off: Relative L2 distance of the worst row.
        sites: The sites that it speaks for, apart from the stream itself.
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
        first, *added, last = (torch.from_numpy(values(site)).to(dtype) for site in sites)
        share, off = _best_sum(first, added, last)
        text = f"{' + '.join(map(str, sites[:-1]))} = {sites[-1]}"
        spoken = tuple(site for site in sites if site.kind not in ("resid_pre", "resid_post"))
        return Finding(text, share >= _EXACT_SHARE, off, spoken)

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


def _best_sum(
    first: torch.Tensor, added: Sequence[torch.Tensor], last: torch.Tensor
) -> tuple[float, float]:
    """Share of exact numbers and relative L2 of the worst row, in the best order of addition."""
    sums = []
    for order in permutations(added):
        one_by_one = first
        for value in order:
            one_by_one = one_by_one + value
        together = order[0]
        for value in order[1:]:
            together = together + value
        sums += [one_by_one, first + together]
    shares = [float((total == last).double().mean()) for total in sums]
    best = int(np.argmax(shares))
    distance = (sums[best].double() - last.double()).norm(dim=-1)
    off = float((distance / last.double().norm(dim=-1).clamp_min(1e-30)).max())
    return shares[best], off

"""The parts of the self-test that speak for sites: identities, and passes that stop early."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from wllm_ray.capture.coverage import ChunkCapture, RowsWanted
from wllm_ray.capture.identities import Finding, check_block, check_stream, refused_sites
from wllm_ray.capture.proof import (
    Floats,
    Sites,
    Subject,
    failed,
    features_of,
    probe_prompts,
    two_positions,
)
from wllm_ray.errors import CaptureError
from wllm_ray.sites import HookSite

__all__ = ["check_depth", "check_sites"]

# Tokens of two short prompts that share a pass.
_SHORT = (24, 9)
_LISTED = 4


def check_sites(subject: Subject) -> tuple[str, str, frozenset[HookSite]]:
    """Every hook fires once, and what the sites must add up to they do; else they are refused."""
    prompts = probe_prompts(subject, [min(n, subject.max_model_len) for n in _SHORT])
    rows = [
        RowsWanted(index, prompt, np.arange(len(prompt), dtype=np.int64))
        for index, prompt in enumerate(prompts)
    ]
    chunk = subject.capture(rows, tuple(subject.readings), None)
    # A pruned branch adds zeros, which cannot be told from a capture that went wrong.
    zero = _branches_of_zeros(chunk)
    if zero:
        chunk = subject.capture(rows, tuple(s for s in subject.readings if s not in zero), None)
    features_of(chunk)

    def values(site: HookSite) -> Floats:
        return chunk.features[:, chunk.columns[site]]

    _check_chain(subject, values)
    dtype = getattr(torch, subject.dtype)
    findings: list[Finding] = []
    for layer in range(subject.num_layers):
        offered = [site.kind for site in chunk.sites if site.layer == layer]
        findings += check_block(layer, offered, values, dtype)
    broken = [finding for finding in findings if not finding.holds]
    refused = refused_sites(findings, subject.readings, subject.num_layers) | zero
    told = f"{len(findings) - len(broken)} of {len(findings)} hold"
    if findings and not broken:
        told += f", relative L2 at most {max(finding.off for finding in findings):.1e}"
    if zero:
        told += f"; zero throughout, not offered: {', '.join(map(str, sorted(zero, key=str)))}"
    for finding in broken[:_LISTED]:
        told += f"; {finding.text} is off by {finding.off:.1e}, not offered"
    return f"{len(chunk.sites)} sites, each read once in every pass", told, refused


def _branches_of_zeros(chunk: ChunkCapture) -> set[HookSite]:
    """Branches that were captured everywhere and are zero throughout; the stream never is."""
    captured = (chunk.counts == 1).all(axis=0)
    return {
        site
        for site, there in zip(chunk.sites, captured, strict=True)
        if there and "_out" in site.kind and not chunk.features[:, chunk.columns[site]].any()
    }


def _check_chain(subject: Subject, values: Callable[[HookSite], Floats]) -> None:
    """The stream itself: nothing here may be off, or no site of the model could be trusted."""
    embed, first = HookSite(None, "embed"), HookSite(0, "resid_pre")
    pairs = [(embed, first)] + [
        (HookSite(layer, "resid_post"), HookSite(layer + 1, "resid_pre"))
        for layer in range(subject.num_layers - 1)
    ]
    for before, after in pairs:
        if not check_stream(values(before), values(after)):
            raise failed(f"{after} is not what {before} is; the stream is read at a wrong place")


def check_depth(subject: Subject) -> tuple[bool, str]:
    """Rows of passes that stop early are those of whole passes, to the bit."""
    if not subject.bounds_depth:
        return False, "every pass runs all blocks, as was asked"
    prompts = probe_prompts(subject, [min(n, subject.max_model_len) for n in (33, 7)])
    wanted = [two_positions(index, prompt) for index, prompt in enumerate(prompts)]
    last = subject.num_layers - 1
    asked: list[Sites] = [(HookSite(None, "embed"),)]
    asked += [subject.stream([layer]) for layer in sorted({0, last // 2, last})]
    whole = [features_of(subject.capture(wanted, sites, None)) for sites in asked]
    subject.set_depth_bounded(True)
    try:
        cut = [features_of(subject.capture(wanted, sites, None)) for sites in asked]
    except CaptureError as error:
        return False, f"every pass runs all blocks: this model cannot be cut ({error.message})"
    finally:
        subject.set_depth_bounded(False)
    for sites, full, short in zip(asked, whole, cut, strict=True):
        if not all(np.array_equal(a, b) for a, b in zip(full, short, strict=True)):
            return False, f"every pass runs all blocks: cut after {sites[0]}, the rows differ"
    depths = ", ".join(str(sites[0]) for sites in asked)
    return True, f"passes stop at the deepest block wanted; rows of {depths} equal to the bit"

"""Capture on a stand-in model: nothing to download, no GPU, no vLLM.

``python -m wllm_ray.capture.toy`` runs the real extractor on :class:`ToyModel`, three blocks with
random weights (one Mamba-like, one of experts, one of attention and a feed-forward), and prints
every site with its width and size, and the identities that the sites obey.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from wllm_ray.capture.identities import Finding, check_block
from wllm_ray.capture.toy_model import HIDDEN, VOCAB, ToyModel
from wllm_ray.capture.transformers_capture import TransformersCapture
from wllm_ray.offered import offered_sites
from wllm_ray.records import CaptureTask, EngineDescription, TokenRow
from wllm_ray.sites import HookSite

__all__ = ["main", "open_toy"]

Floats = NDArray[np.float32]

_MAX_LEN = 48
_SEED = 20261129


def open_toy() -> TransformersCapture:
    """The extractor on a new toy model, proven by its self-test; the caller closes it."""
    torch.manual_seed(_SEED)
    return TransformersCapture(
        ToyModel().eval(),
        num_layers=3,
        hidden_size=HIDDEN,
        vocab_size=VOCAB,
        max_model_len=_MAX_LEN,
    )


def main() -> int:
    """Capture every site of a few rows and print what came; 1 where an identity does not hold."""
    random = np.random.default_rng(_SEED)
    rows = [random.integers(0, VOCAB, length).astype(np.int32) for length in (5, 19, 12)]
    with open_toy() as engine:
        told = engine.description
        task = CaptureTask(
            offered_sites(told),
            "all_prompt",
            tuple(TokenRow(index, ids) for index, ids in enumerate(rows)),
        )
        chunk = engine.capture(task)
    edges = np.cumsum((0, *chunk.widths)).tolist()
    values = {
        site: chunk.features[:, start:stop]
        for site, (start, stop) in zip(task.sites, pairwise(edges), strict=True)
    }
    findings = _identities(values, told.num_layers)
    tokens = ", ".join(map(str, chunk.lengths.tolist()))
    _write(f"{len(rows)} rows of {tokens} tokens, {len(chunk.failures)} failed")
    for line in _report(told, values, findings):
        _write(line)
    return int(bool(chunk.failures) or not all(finding.holds for finding in findings))


def _write(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _report(
    told: EngineDescription, values: Mapping[HookSite, Floats], findings: Sequence[Finding]
) -> Iterator[str]:
    yield f"{told.architecture}: {told.num_layers} blocks ({'; '.join(told.layer_types)})"
    yield f"\n{'site':<24}{'width':>6}{'mean norm':>11}"
    for site, rows in values.items():
        norm = float(np.linalg.norm(rows, axis=1).mean())
        yield f"{site!s:<24}{rows.shape[1]:>6}{norm:>11.3f}"
    yield "\nidentities"
    for found in findings:
        verdict = "holds" if found.holds else "does NOT hold"
        yield f"{found.text}: {verdict}, relative L2 {found.off:.1e}"
    yield "\nself-test"
    for name, result in told.selftest.checks.items():
        yield f"{name}: {result}"


def _identities(values: Mapping[HookSite, Floats], blocks: int) -> list[Finding]:
    return [
        finding
        for layer in range(blocks)
        for finding in check_block(
            layer,
            [site.kind for site in values if site.layer == layer],
            values.__getitem__,
            torch.float32,
        )
    ]


if __name__ == "__main__":
    sys.exit(main())

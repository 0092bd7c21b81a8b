"""The proof, at every start, that this engine captures the right rows, and how exactly.

Nothing is taken from a table: the model, dtype, thread count and engine at hand are measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from wllm_ray.capture.coverage import ChunkCapture, RowsWanted
from wllm_ray.capture.proof import (
    SEED,
    Floats,
    Proof,
    Sites,
    Subject,
    failed,
    features_of,
    probe_prompts,
    two_positions,
)
from wllm_ray.capture.rounding import expect_same_rows, relative_l2
from wllm_ray.capture.selftest_sites import check_depth, check_sites
from wllm_ray.records import SelfTestReport

__all__ = ["run_selftest"]

_LENGTHS = (1, 3, 8, 9, 17, 33, 65, 129, 257, 513)
_LONGEST = 2000
_LOGPROBS = 20
_LOGIT_PROBE_TOKENS = 24
# Log-probabilities from the captured row against the engine's own: the same arithmetic, but for
# the last bits of a matrix product, so a few units in the last place of the largest logit.
_ULPS = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
_LOGPROB_FLOOR = 1e-3
# Relative L2 between two blocks' streams under which log-probabilities do not tell them apart.
_TELLING = 1e-2


def run_selftest(subject: Subject) -> Proof:
    """Run all checks.

    Raises:
        CaptureError: A check failed (code ``self_test_failed``); the message says which and how.
    """
    started = time.monotonic()
    subject.set_depth_bounded(False)
    checks = {"residual": subject.residual, "logits": _check_logits(subject)}
    checks["hooks"], checks["identities"], refused = check_sites(subject)
    lengths = _lengths(subject)
    sites = tuple(site for site in subject.readings if site not in refused)
    worst, exact = _compare_both_ways(subject, sites, probe_prompts(subject, lengths))
    if subject.reads_cache:
        cached = _difference_from_cache(subject, lengths)
        worst, exact = max(worst, cached), exact and cached == 0
    checks["rows"] = _check_rows(subject, lengths, worst, exact=exact)
    bounded, checks["depth"] = check_depth(subject)
    subject.set_depth_bounded(bounded)
    bitwise = exact and subject.may_be_bitwise
    report = SelfTestReport(
        passed=True,
        checks=checks,
        reproducibility="bitwise" if bitwise else "tolerance",
        measured_relative_l2=worst,
        prompt_lengths=tuple(lengths),
        residual=subject.residual,
        seconds=round(time.monotonic() - started, 3),
    )
    return Proof(report, refused, bounded)


def _lengths(subject: Subject) -> list[int]:
    """Up to 2,000 tokens, the model's own limit where that is less, and around the split size."""
    longest = min(subject.max_model_len, _LONGEST)
    split = subject.split_tokens
    wanted = {*_LENGTHS, longest, split + 1, 2 * split + 1}
    return sorted(length for length in wanted if length <= longest)


def _compare_both_ways(
    subject: Subject, offered: Sites, prompts: Sequence[NDArray[np.int32]]
) -> tuple[float, bool]:
    """Each prompt alone, and all in one batch: how far apart, and whether equal to the bit."""
    blocks = {subject.num_layers // 2, subject.num_layers - 1}
    sites = tuple(
        site
        for site in offered
        if site.kind == "resid_post" or site.layer in blocks or site.layer is None
    )
    wanted = [two_positions(index, prompt) for index, prompt in enumerate(prompts)]
    alone = [features_of(subject.capture([one], sites, None))[0] for one in wanted]
    # Long ones first, so that the tails of split prompts share their passes with short prompts.
    shuffled = np.random.default_rng(SEED).permutation(len(wanted)).tolist()
    order = sorted(shuffled, key=lambda i: len(prompts[i]) <= subject.split_tokens)
    together = subject.capture([wanted[i] for i in order], sites, None)
    apart = [alone[index] for index in order]
    worst = _check_each(together, apart, subject)
    pairs = zip(features_of(together), apart, strict=True)
    return worst, all(np.array_equal(found, one) for found, one in pairs)


def _difference_from_cache(subject: Subject, lengths: Sequence[int]) -> float:
    """Relative L2 of the last tokens' rows between the first time and one that finds the prefix."""
    sites = subject.stream(range(subject.num_layers))
    rows = [
        RowsWanted(index, prompt, np.array([len(prompt) - 1], dtype=np.int64))
        for index, prompt in enumerate(probe_prompts(subject, lengths))
    ]
    first, again = (features_of(subject.capture(rows, sites, None)) for _ in range(2))
    return _largest_difference(first, again)


def _check_each(chunk: ChunkCapture, alone: Sequence[Floats], subject: Subject) -> float:
    """Site by site: beside a wide stream, a wrong narrow site would not be seen."""
    found, expected = np.concatenate(features_of(chunk)), np.concatenate(alone)
    return max(
        expect_same_rows(site, found[:, columns], expected[:, columns], subject.dtype)
        for site, columns in chunk.columns.items()
    )


def _largest_difference(one: Sequence[Floats], other: Sequence[Floats]) -> float:
    return float(relative_l2(np.concatenate(one), np.concatenate(other)).max())


def _check_rows(subject: Subject, lengths: Sequence[int], worst: float, *, exact: bool) -> str:
    split = sum(length > subject.split_tokens for length in lengths)
    how = "equal to the bit" if exact else f"relative L2 at most {worst:.2e}"
    if exact and not subject.may_be_bitwise:
        how += ", which threads, a recurrent state or a prefix cache do not promise for every batch"
    return f"{len(lengths)} prompts, {split} in prefill chunks, alone and in a batch: {how}"


def _check_logits(subject: Subject) -> str:
    """Final norm and head on the last block's capture give the engine's own log-probabilities."""
    if subject.log_probabilities is None:
        return "no head: there are no log-probabilities to reproduce, the identities stand alone"
    prompt = probe_prompts(subject, [min(_LOGIT_PROBE_TOKENS, subject.max_model_len)])[0]
    last = np.array([len(prompt) - 1], dtype=np.int64)
    sites = subject.stream(range(max(0, subject.num_layers - 2), subject.num_layers))
    chunk = subject.capture([RowsWanted(0, prompt, last)], sites, _LOGPROBS)
    rows = features_of(chunk)[0][0].reshape(len(sites), -1)
    own = chunk.rows[0].logprobs
    found = subject.log_probabilities(rows)
    error, *neighbour = (_logprob_error(row, own) for row in found[::-1])
    scale = float(np.abs(found[-1]).max())
    allowed = max(_LOGPROB_FLOOR, 4 * _ULPS.get(subject.dtype, 0.0) * scale)
    if not error <= allowed:
        raise failed(
            f"final norm and head on the last block's capture differ from the engine's own "
            f"log-probabilities by {error:.2e}, expected at most {allowed:.2e}"
        )
    change = float(relative_l2(rows[0], rows[-1])) if neighbour else 0.0
    if neighbour and change < _TELLING:
        return (
            f"log-probabilities of {len(own)} tokens reproduced within {error:.2e}; the last block "
            f"changes too little to be told from the one before it (relative L2 {change:.0e})"
        )
    if neighbour and not error < neighbour[0] / 4:
        raise failed(
            f"the block before the last explains the engine's log-probabilities as well "
            f"({neighbour[0]:.2e}) as the last one ({error:.2e})"
        )
    told = f"; from the block before, {neighbour[0]:.2e}" if neighbour else ""
    return f"log-probabilities of {len(own)} tokens reproduced within {error:.2e}{told}"


def _logprob_error(row: Floats, own: dict[int, float]) -> float:
    if not own:
        raise failed("the engine returned no log-probabilities for the probe prompt")
    ids = np.array(list(own), dtype=np.int64)
    return float(np.abs(row[ids] - np.array(list(own.values()))).max())

"""The proof, at every start, that this engine captures the right rows, and how exactly.

Nothing is taken from a table: the model, dtype, thread count and vLLM at hand are measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wllm_ray.capture.coverage import ChunkCapture, RowsWanted
from wllm_ray.errors import CaptureError
from wllm_ray.records import SelfTestReport

__all__ = ["NOT_TESTED", "Subject", "run_selftest"]

Floats = NDArray[np.float32]

_SEED = 20261129
_LENGTHS = (1, 3, 8, 9, 17, 33, 65, 129, 257, 513)
_LONGEST = 2000
_LOGPROBS = 20
_LOGIT_PROBE_TOKENS = 24
# Relative L2 between the same row captured alone and in a batch, above which it is another row and
# not rounding: real models differ by up to 1.4e-2 in bfloat16 (more threads, other kernels).
_SAME_ROW = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}
# Log-probabilities from the captured row against the engine's own: the same arithmetic, but for
# the last bits of a matrix product, so a few units in the last place of the largest logit.
_ULPS = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
_LOGPROB_FLOOR = 1e-3


NOT_TESTED = SelfTestReport(
    passed=False,
    checks={"skipped": "the self-test was turned off"},
    reproducibility="tolerance",
    measured_relative_l2=0.0,
    prompt_lengths=(),
    residual="not tested",
    seconds=0.0,
)


@dataclass(frozen=True, slots=True)
class Subject:
    """What the self-test needs of an engine.

    Attributes:
        capture: Runs rows together and returns their chunk: (rows, layers, number of logprobs).
        log_probabilities: [N, vocab] from [N, hidden] rows of the last block, through the model's
            own final norm and head.
        num_layers, vocab_size, max_model_len, split_tokens: The engine's sizes.
        dtype: The model's dtype, as ``float32``.
        residual: How the stream is read, in words.
        may_be_bitwise: The set-up allows equality to the bit: one thread or batch-invariant mode,
            and no state that layers carry from pass to pass.
    """

    capture: Callable[[list[RowsWanted], tuple[int, ...], int | None], ChunkCapture]
    log_probabilities: Callable[[Floats], Floats]
    num_layers: int
    vocab_size: int
    max_model_len: int
    split_tokens: int
    dtype: str
    residual: str
    may_be_bitwise: bool


def run_selftest(subject: Subject) -> SelfTestReport:
    """Run all checks.

    Raises:
        CaptureError: A check failed (code ``self_test_failed``); the message says which and how.
    """
    started = time.monotonic()
    lengths = _lengths(subject)
    checks = {"residual": subject.residual, "logits": _check_logits(subject)}
    alone, batched = _capture_both_ways(subject, _prompts(subject, lengths))
    checks["hooks"] = f"{subject.num_layers} blocks, each fired once in every pass"
    worst = _largest_difference(alone, batched)
    exact = all(np.array_equal(a, b) for a, b in zip(alone, batched, strict=True))
    checks["rows"] = _check_rows(subject, lengths, worst, exact=exact)
    bitwise = exact and subject.may_be_bitwise
    return SelfTestReport(
        passed=True,
        checks=checks,
        reproducibility="bitwise" if bitwise else "tolerance",
        measured_relative_l2=worst,
        prompt_lengths=tuple(lengths),
        residual=subject.residual,
        seconds=round(time.monotonic() - started, 3),
    )


def _lengths(subject: Subject) -> list[int]:
    """Up to 2,000 tokens, the model's own limit where that is less, and around the split size."""
    longest = min(subject.max_model_len, _LONGEST)
    split = subject.split_tokens
    wanted = {*_LENGTHS, longest, split + 1, 2 * split + 1}
    return sorted(length for length in wanted if length <= longest)


def _prompts(subject: Subject, lengths: Sequence[int]) -> list[NDArray[np.int32]]:
    # Special tokens stand at either end of a vocabulary; they are left out where there is room.
    random = np.random.default_rng(_SEED)
    low, high = subject.vocab_size // 16, subject.vocab_size - subject.vocab_size // 16
    return [random.integers(low, max(high, low + 1), n, dtype=np.int32) for n in lengths]


def _wanted(index: int, prompt: NDArray[np.int32]) -> RowsWanted:
    """The middle and the last position: two places that a wrong offset would not both hit."""
    positions = np.unique([len(prompt) // 2, len(prompt) - 1]).astype(np.int64)
    return RowsWanted(index, prompt, positions)


def _capture_both_ways(
    subject: Subject, prompts: Sequence[NDArray[np.int32]]
) -> tuple[list[Floats], list[Floats]]:
    """Each prompt alone, and all in one batch in another order; in the order of ``prompts``."""
    layers = tuple(range(subject.num_layers))
    wanted = [_wanted(index, prompt) for index, prompt in enumerate(prompts)]
    alone = [_features(subject.capture([one], layers, None))[0] for one in wanted]
    # Long ones first, so that the tails of split prompts share their passes with short prompts.
    shuffled = np.random.default_rng(_SEED).permutation(len(wanted)).tolist()
    order = sorted(shuffled, key=lambda i: len(prompts[i]) <= subject.split_tokens)
    together = _features(subject.capture([wanted[i] for i in order], layers, None))
    batched = dict(zip(order, together, strict=True))
    return alone, [batched[index] for index in range(len(prompts))]


def _features(chunk: ChunkCapture) -> list[Floats]:
    """[positions, layers, hidden] of each row, all proven whole."""
    for row in chunk.rows:
        if row.failure is not None:
            raise _failed(
                f"a probe prompt of {len(row.wanted.token_ids)} tokens was not captured "
                f"({row.failure.code}): {row.failure.message}"
            )
    return [chunk.features[row.slots] for row in chunk.rows]


def _largest_difference(one: Sequence[Floats], other: Sequence[Floats]) -> float:
    return max(_relative_l2(a, b) for a, b in zip(one, other, strict=True))


def _relative_l2(found: Floats, expected: Floats) -> float:
    distance = np.linalg.norm(found.astype(np.float64) - expected, axis=-1)
    size = np.linalg.norm(expected.astype(np.float64), axis=-1)
    return float((distance / np.maximum(size, 1e-30)).max())


def _check_rows(subject: Subject, lengths: Sequence[int], worst: float, *, exact: bool) -> str:
    allowed = _SAME_ROW.get(subject.dtype, 0.0)
    if worst > allowed:
        raise _failed(
            f"the same prompt alone and in a batch gives other activations: relative L2 {worst:.2e}"
            f", at most {allowed} is rounding in {subject.dtype}; rows are attributed wrongly"
        )
    split = sum(length > subject.split_tokens for length in lengths)
    how = "equal to the bit" if exact else f"relative L2 at most {worst:.2e}"
    if exact and not subject.may_be_bitwise:
        how += ", which several threads or a recurrent state do not promise for every batch"
    return f"{len(lengths)} prompts, {split} in prefill chunks, alone and in a batch: {how}"


def _check_logits(subject: Subject) -> str:
    """Final norm and head on the last block's capture give the engine's own log-probabilities."""
    prompt = _prompts(subject, [min(_LOGIT_PROBE_TOKENS, subject.max_model_len)])[0]
    last = np.array([len(prompt) - 1], dtype=np.int64)
    layers = tuple(range(max(0, subject.num_layers - 2), subject.num_layers))
    chunk = subject.capture([RowsWanted(0, prompt, last)], layers, _LOGPROBS)
    rows = _features(chunk)[0][0]
    own = chunk.rows[0].logprobs
    found = subject.log_probabilities(rows)
    error, *neighbour = (_logprob_error(row, own) for row in found[::-1])
    scale = float(np.abs(found[-1]).max())
    allowed = max(_LOGPROB_FLOOR, 4 * _ULPS.get(subject.dtype, 0.0) * scale)
    if not error <= allowed:
        raise _failed(
            f"final norm and head on the last block's capture differ from the engine's own "
            f"log-probabilities by {error:.2e}, expected at most {allowed:.2e}"
        )
    if neighbour and not error < neighbour[0] / 4:
        raise _failed(
            f"the block before the last explains the engine's log-probabilities as well "
            f"({neighbour[0]:.2e}) as the last one ({error:.2e})"
        )
    told = f"; from the block before, {neighbour[0]:.2e}" if neighbour else ""
    return f"log-probabilities of {len(own)} tokens reproduced within {error:.2e}{told}"


def _logprob_error(row: Floats, own: dict[int, float]) -> float:
    if not own:
        raise _failed("the engine returned no log-probabilities for the probe prompt")
    ids = np.array(list(own), dtype=np.int64)
    return float(np.abs(row[ids] - np.array(list(own.values()))).max())


def _failed(message: str) -> CaptureError:
    return CaptureError(f"self-test: {message}", code="self_test_failed")

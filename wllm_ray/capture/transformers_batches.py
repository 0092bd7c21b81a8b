"""Which rows share a forward pass: rows of like length, padded on the right to the longest.

A token of a causal model sees only what stands before it, so padding behind a row changes nothing
in it; padded places are never read. The self-test compares rows alone and in batches all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wllm_ray.errors import InvalidInputError

__all__ = ["BatchLimits", "SequencesPerCall", "batch_limits", "pad", "plan_batches"]

SequencesPerCall: TypeAlias = int | Literal["auto"]

# Padded tokens of one pass. More of them make a CPU no faster; a GPU wants more to be busy.
_AUTO_TOKENS = {"cpu": 2048, "cuda": 16384}
_AUTO_ROWS = 256


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one forward pass may hold.

    Attributes:
        rows: The most rows.
        padded_tokens: The most tokens, padding included, where there is more than one row; None
            for any number.
        apart_at: Rows up to this length and longer ones never share a pass; None where they may.
    """

    rows: int
    padded_tokens: int | None = None
    apart_at: int | None = None


def batch_limits(
    sequences: SequencesPerCall, device_type: str, apart_at: int | None = None
) -> BatchLimits:
    """The limits for a number of rows a pass, or for what suits the device (``auto``).

    Raises:
        InvalidInputError: Neither ``auto`` nor a positive integer.
    """
    if sequences == "auto":
        tokens = _AUTO_TOKENS.get(device_type, _AUTO_TOKENS["cuda"])
        return BatchLimits(_AUTO_ROWS, tokens, apart_at)
    if not isinstance(sequences, int) or isinstance(sequences, bool) or sequences < 1:
        raise InvalidInputError(
            f"sequences_per_call is 'auto' or the most rows of one forward pass, at least 1; found "
            f"{sequences!r}",
            code="invalid_argument",
        )
    return BatchLimits(sequences, None, apart_at)


def plan_batches(lengths: Sequence[int], limits: BatchLimits) -> list[list[int]]:
    """Sort rows into passes, the longest first: memory that does not suffice is found out early.

    Args:
        lengths: Tokens of each row.
        limits: What one pass may hold; a row over the limit of tokens runs alone.

    Returns:
        For each pass the numbers of its rows; every row is in exactly one.
    """
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        if batches and _fits(lengths, batches[-1], row, limits):
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def pad(prompts: Sequence[NDArray[np.int32]]) -> NDArray[np.int64]:
    """[B, T] token ids, T the longest prompt; behind a prompt stand zeros, which nobody reads."""
    padded = np.zeros((len(prompts), max(map(len, prompts))), dtype=np.int64)
    for row, prompt in zip(padded, prompts, strict=True):
        row[: len(prompt)] = prompt
    return padded


def _fits(lengths: Sequence[int], batch: list[int], row: int, limits: BatchLimits) -> bool:
    longest, rows = lengths[batch[0]], len(batch) + 1
    if rows > limits.rows:
        return False
    if limits.padded_tokens is not None and rows * longest > limits.padded_tokens:
        return False
    edge = limits.apart_at
    return edge is None or (longest > edge) == (lengths[row] > edge)

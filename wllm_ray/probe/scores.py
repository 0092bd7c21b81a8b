"""Accuracy with an interval that does not take rows of one group for independent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Score", "score", "wilson_interval"]

# 95 % of a normal distribution lies within this many standard deviations.
_Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class Score:
    """Accuracy on the test rows, with its 95 % interval.

    Rows of one group are not independent, so the Wilson interval is taken at the effective number
    of rows: what the spread between groups leaves of them, never under the number of groups.
    """

    accuracy: float
    low: float
    high: float
    rows: int
    groups: int


def score(right: NDArray[np.float64], groups: NDArray[Any]) -> Score:
    """The accuracy of right (1) and wrong (0) answers, with its interval; see :class:`Score`."""
    rows, count = len(right), len(set(groups.tolist()))
    accuracy = float(right.mean())
    members = groups == np.unique(groups)[:, None]
    excess = members @ (right - accuracy)
    variance = float((excess**2).sum()) * count / max(count - 1, 1) / rows**2
    effective = accuracy * (1 - accuracy) / variance if variance > 0 else count
    low, high = wilson_interval(accuracy, min(max(effective, count), rows))
    return Score(accuracy=accuracy, low=low, high=high, rows=rows, groups=count)


def wilson_interval(share: float, rows: float) -> tuple[float, float]:
    """Wilson's 95 % interval for a share of ``rows`` independent trials."""
    square = _Z95**2 / rows
    centre = (share + square / 2) / (1 + square)
    half = _Z95 / (1 + square) * math.sqrt(share * (1 - share) / rows + square / (4 * rows))
    return max(0.0, centre - half), min(1.0, centre + half)

"""Which feature rows stand for all of them, where looking at all would cost too much."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Sample", "draw"]


@dataclass(frozen=True, slots=True)
class Sample:
    """Some of the things that are numbered from 0 to ``total``.

    Attributes:
        numbers: [n] int64, ascending, each once.
        total: How many there are to choose from.
    """

    numbers: NDArray[np.int64]
    total: int

    def __len__(self) -> int:
        return len(self.numbers)

    def __str__(self) -> str:
        return f"all {self.total:,}" if self.complete else f"{len(self):,} of {self.total:,}"

    @property
    def complete(self) -> bool:
        """Whether nothing was left out."""
        return len(self) == self.total

    def within(self, start: int, count: int) -> NDArray[np.int64]:
        """Those from ``start`` on, among ``count``, numbered from there: [m] int64."""
        low, high = np.searchsorted(self.numbers, [start, start + count])
        return self.numbers[low:high] - start


def draw(total: int, most: int, seed: int) -> Sample:
    """Draw without replacement, the same for the same seed; all of them where there are few."""
    if total <= most:
        return Sample(np.arange(total, dtype=np.int64), total)
    drawn = np.random.default_rng(seed).choice(total, most, replace=False, shuffle=False)
    return Sample(np.sort(drawn).astype(np.int64), total)

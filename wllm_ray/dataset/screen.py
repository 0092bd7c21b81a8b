"""Captured values that must not be stored: what is not finite, and vectors of zeros."""

from __future__ import annotations

from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.manifest import DatasetSpec
from wllm_ray.dataset.shard import all_finite
from wllm_ray.records import CapturedChunk, RowFailure

__all__ = ["Screen"]


class Screen:
    """Reads the values of a chunk once, and those of a single row only where there is a reason.

    Args:
        spec: Names the sites and their widths.
        chunk: What was captured.
    """

    def __init__(self, spec: DatasetSpec, chunk: CapturedChunk) -> None:
        self._sites = spec.sites
        self._ends = tuple(accumulate(spec.site_widths))
        self._starts = (0, *self._ends[:-1])
        self._features = chunk.features
        self._is_finite = all_finite(chunk.features)
        # [feature rows, sites]: a vector that does not begin with zero need not be read.
        self._suspects = chunk.features[:, self._starts] == 0

    def failure(self, start: int, stop: int) -> RowFailure | None:
        """Why the row that these feature rows are of must not be stored; None where it may be."""
        return self._non_finite(start, stop) or self._all_zero(start, stop)

    def _non_finite(self, start: int, stop: int) -> RowFailure | None:
        values = self._features[start:stop]
        if self._is_finite or all_finite(values):
            return None
        at, column = np.argwhere(~np.isfinite(values))[0].tolist()
        site = int(np.searchsorted(self._ends, column, side="right"))
        return RowFailure.of(
            "non_finite",
            f"{self._sites[site]} holds NaN or infinity, first at feature row {at} of the row, "
            f"component {column - self._starts[site]}",
        )

    def _all_zero(self, start: int, stop: int) -> RowFailure | None:
        for at, site in _places(self._suspects[start:stop]):
            vector = self._features[start + at, self._starts[site] : self._ends[site]]
            if not vector.any():
                return RowFailure.of(
                    "all_zero",
                    f"every value of {self._sites[site]} is zero at feature row {at} of the row",
                )
        return None


def _places(mask: NDArray[np.bool_]) -> list[list[int]]:
    """Where a [feature rows, sites] mask holds."""
    places: list[list[int]] = np.argwhere(mask).tolist() if mask.any() else []
    return places

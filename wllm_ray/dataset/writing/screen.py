"""Captured values that must not be stored: NaN, infinity, vectors of zeros, what does not fit."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.format.dtypes import all_finite, is_exact, is_finite, narrow, widen
from wllm_ray.dataset.format.manifest import DatasetSpec
from wllm_ray.records import CapturedChunk, RowFailure

__all__ = ["Screen"]


class Screen:
    """Reads the values of a chunk once, and those of a single row only where there is a reason.

    Args:
        spec: Names the sites, their widths, and the dtype that they are stored in.
        chunk: What was captured.

    Attributes:
        stored: [feature rows, sum of the widths], the values as they are stored; those of rows
            that fail may be anything.
        is_fine: Whether every row may be stored.
    """

    def __init__(self, spec: DatasetSpec, chunk: CapturedChunk) -> None:
        self._sites = spec.sites
        self._dtype = spec.dtype
        self._ends = tuple(accumulate(spec.site_widths))
        self._starts = (0, *self._ends[:-1])
        self._features = chunk.features
        self.stored = narrow(chunk.features, spec.dtype)
        self._is_finite = all_finite(chunk.features, "float32")
        self._is_lossless = spec.storage_dtype == "native"
        self._fits = spec.dtype == "float32" or self._fit(chunk.features, self.stored)
        # [feature rows, sites]: a vector that does not begin with zero need not be read. In
        # bfloat16 only what is zero in float32 is zero as well.
        values = self.stored if spec.dtype == "float16" else chunk.features
        self._suspects = values[:, self._starts] == 0
        self.is_fine = self._is_finite and self._fits and not self._suspects.any()

    def failure(self, start: int, stop: int) -> RowFailure | None:
        """Why the row that these feature rows are of must not be stored; None where it may be."""
        if self.is_fine:
            return None
        return (
            self._non_finite(start, stop)
            or self._all_zero(start, stop)
            or self._does_not_fit(start, stop)
        )

    def _non_finite(self, start: int, stop: int) -> RowFailure | None:
        values = self._features[start:stop]
        if self._is_finite or all_finite(values, "float32"):
            return None
        return RowFailure.of(
            "non_finite", f"{self._first(~np.isfinite(values), 'holds NaN or infinity')}"
        )

    def _all_zero(self, start: int, stop: int) -> RowFailure | None:
        for at, site in _places(self._suspects[start:stop]):
            columns = slice(self._starts[site], self._ends[site])
            place = f"{self._sites[site]} is zero at feature row {at} of the row"
            if not self._features[start + at, columns].any():
                return RowFailure.of("all_zero", f"every value of {place}")
            if not self.stored[start + at, columns].any():
                return RowFailure.of(
                    "storage_overflow",
                    f"every value of {place} once it is rounded to {self._dtype}; store float32 or "
                    f"native",
                )
        return None

    def _fit(self, values: NDArray[np.float32], stored: NDArray[Any]) -> bool:
        """Whether all values have room in the dtype and, where it is native, are not rounded."""
        return all_finite(stored, self._dtype) and not (
            self._is_lossless and not is_exact(values, stored, self._dtype)
        )

    def _does_not_fit(self, start: int, stop: int) -> RowFailure | None:
        """What float16 has no room for, or what the engine's own dtype would round."""
        values, stored = self._features[start:stop], self.stored[start:stop]
        if self._fits or self._fit(values, stored):
            return None
        wrong = ~is_finite(stored, self._dtype)
        if wrong.any():
            at, column = np.argwhere(wrong)[0].tolist()
            said = f"holds {values[at, column]:.6g}, which is too large for {self._dtype}"
            instead = "float32 or native"
        else:
            wrong = widen(stored, self._dtype) != values
            said = f"holds values that {self._dtype} would round, though it is the engine's dtype"
            instead = "float32"
        return RowFailure.of("storage_overflow", f"{self._first(wrong, said)}; store {instead}")

    def _first(self, wrong: NDArray[np.bool_], said: str) -> str:
        """What is said of the site that has the first wrong value, and where that is."""
        at, column = np.argwhere(wrong)[0].tolist()
        site = int(np.searchsorted(self._ends, column, side="right"))
        return (
            f"{self._sites[site]} {said}, first at feature row {at} of the row, component "
            f"{column - self._starts[site]}"
        )


def _places(mask: NDArray[Any]) -> list[list[int]]:
    """Where a [feature rows, sites] mask holds."""
    places: list[list[int]] = np.argwhere(mask).tolist() if mask.any() else []
    return places

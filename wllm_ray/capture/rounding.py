"""Whether rows that were captured twice differ by rounding alone, or are other rows."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from wllm_ray.capture.proof import Floats, failed
from wllm_ray.sites import HookSite

__all__ = ["expect_same_rows", "relative_l2"]

# Relative L2 that is taken for rounding: real models differ by up to 1.4e-2 in bfloat16 between
# numbers of threads, and by up to 1e-5 in float32 between batches.
_ROUNDING = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 1e-1}
# In 16 bits a branch can be a small difference of large numbers. 0.13 was seen where the capture
# was right: attention of the last block of Gemma 3 270M, which in float32 differs by 6e-6. Up to
# so many times as much counts as rounding where there are other rows and every one is so many times
# as far away; there the nearest one was at 0.7. But only where the median row is within the plain
# bound: what is off at most rows is an error of the capture, and no prompt's bad luck.
_MORE, _FARTHER = 3, 4


def relative_l2(found: Floats, expected: Floats) -> NDArray[np.float64]:
    """[R]: how far each row is from the expected one, by the length of that; both [R, D]."""
    sizes = np.maximum(_lengths(expected), 1e-30)
    apart: NDArray[np.float64] = _lengths(found.astype(np.float64) - expected) / sizes
    return apart


def expect_same_rows(site: HookSite, found: Floats, alone: Floats, dtype: str) -> float:
    """Compare rows of a batch with the same rows, captured alone.

    Args:
        site: Where they were read.
        found: [R, D]
        alone: [R, D]
        dtype: The model's.

    Returns:
        The largest relative L2 between the two.

    Raises:
        CaptureError: One of them is not the same row (``self_test_failed``).
    """
    allowed = _ROUNDING.get(dtype, 0.0)
    apart = relative_l2(found, alone)
    median = float(np.median(apart)) if len(apart) else 0.0
    may_be_more = dtype != "float32" and median <= allowed
    for row in np.flatnonzero(~(apart <= allowed)):
        nearest = _nearest_other(found[row], alone, row)
        is_far = np.isfinite(nearest) and apart[row] * _FARTHER <= nearest
        if not (may_be_more and apart[row] <= _MORE * allowed and is_far):
            others = (
                f"the nearest row of another prompt is at {nearest:.2e}"
                if np.isfinite(nearest)
                else "there is no row of another prompt to tell it from"
            )
            raise failed(
                f"the same prompt alone and in a batch gives another {site}: relative L2 "
                f"{apart[row]:.2e}, the median row's {median:.2e}, where {allowed} is rounding in "
                f"{dtype} and {others}. Either rows are attributed wrongly, or the "
                f"model computes a row differently beside others; with dtype float32, what was "
                f"rounding is gone"
            )
    return float(apart.max(initial=0.0))


def _nearest_other(found: Floats, alone: Floats, row: int) -> float:
    """As :func:`relative_l2`, to the nearest row that is another one, if only by its values.

    Infinite where there is no other row.
    """
    others = alone[(alone != alone[row]).any(axis=-1)]
    distances = _lengths(others.astype(np.float64) - found)
    return float(distances.min(initial=np.inf) / max(float(_lengths(alone[row])), 1e-30))


def _lengths(rows: Floats | NDArray[np.float64]) -> NDArray[np.float64]:
    lengths: NDArray[np.float64] = np.linalg.norm(rows.astype(np.float64), axis=-1)
    return lengths

"""The dtypes that values are stored in. NumPy has no bfloat16: there, its 16 bits are uint16.

Captured values are float32, exactly as wide as the model's own or wider. Storing them narrower is
asked for; that no value is lost on the way is checked where it is written, not here.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wllm_ray.errors import NotOfferedError
from wllm_ray.positions import is_reduced
from wllm_ray.schema import StorageDtype

__all__ = [
    "Dtype",
    "all_finite",
    "is_exact",
    "is_finite",
    "narrow",
    "numpy_dtype",
    "resolve_dtype",
    "widen",
]

Dtype: TypeAlias = Literal["float32", "bfloat16", "float16"]

_NUMPY: dict[Dtype, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "bfloat16": np.dtype("<u2"),
    "float16": np.dtype("<f2"),
}
# Exponent bits of a bfloat16: all set in NaN and infinity, and in nothing else.
_BFLOAT16_EXPONENT = np.uint16(0x7F80)
# Small enough for the second reading of a block to come from the cache.
_BLOCK_BYTES = 1 << 19


def numpy_dtype(dtype: Dtype) -> np.dtype[Any]:
    """What NumPy calls the stored values, little-endian."""
    return _NUMPY[dtype]


def resolve_dtype(storage_dtype: StorageDtype, engine_dtype: str, position: str) -> Dtype:
    """The dtype that a dataset is stored in.

    ``native`` is the dtype in which the value was computed: the engine's, or float32 where
    positions are averaged, which is done in float32.

    Args:
        storage_dtype: What was asked for.
        engine_dtype: As the engine's fingerprint says.
        position: Canonical.

    Raises:
        NotOfferedError: ``native``, and the engine's dtype is none of those that are stored
            (``storage_dtype_not_offered``).
    """
    if storage_dtype == "native" and not is_reduced(position):
        for dtype in _NUMPY:
            if dtype == engine_dtype:
                return dtype
        raise NotOfferedError(
            f"storage_dtype `native` would be {engine_dtype} here, and only "
            f"{', '.join(_NUMPY)} are stored; ask for `float32`",
            code="storage_dtype_not_offered",
        )
    return "float16" if storage_dtype == "float16" else "float32"


def narrow(values: NDArray[np.float32], dtype: Dtype) -> NDArray[Any]:
    """Values as they are stored: float16 rounded to nearest, bfloat16 cut to its upper 16 bits.

    Args:
        values: float32, C order.
        dtype: How they are stored.

    Returns:
        The same shape in :func:`numpy_dtype`, C order; ``values`` themselves where nothing is to
        be done.
    """
    if dtype == "float32":
        return values
    if dtype == "bfloat16":
        return np.ascontiguousarray(_halves(values)[..., 1])
    with np.errstate(over="ignore"):
        return values.astype(_NUMPY[dtype])


def widen(stored: NDArray[Any], dtype: Dtype) -> NDArray[np.float32]:
    """Stored values as float32, which holds each of them exactly; not copied where they are."""
    if dtype != "bfloat16":
        return stored.astype(np.float32, copy=False)
    wide: NDArray[np.float32] = np.left_shift(stored, 16, dtype="<u4").view("<f4")
    return wide


def is_finite(stored: NDArray[Any], dtype: Dtype) -> NDArray[np.bool_]:
    """For each stored value, whether it is neither NaN nor infinity."""
    if dtype == "bfloat16":
        return np.asarray((stored & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT)
    return np.asarray(np.isfinite(stored))


def all_finite(stored: NDArray[Any], dtype: Dtype) -> bool:
    """Whether a C-ordered array of stored values holds neither NaN nor infinity."""
    flat = stored.reshape(-1)
    if dtype == "float32":
        # NaN and infinity make any sum of squares one of them (IEEE 754), and this is one call
        # without the interpreter lock. Only squares that overflow leave the question open.
        with np.errstate(all="ignore"):
            if np.isfinite(np.dot(flat, flat)):
                return True
    step = _BLOCK_BYTES // flat.itemsize
    blocks = (flat[at : at + step] for at in range(0, flat.size, step))
    return all(bool(is_finite(block, dtype).all()) for block in blocks)


def _halves(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """[..., 2] uint16: the lower and the upper half of each float32."""
    return np.ascontiguousarray(values, "<f4").view("<u2").reshape(*values.shape, 2)


def is_exact(values: NDArray[np.float32], stored: NDArray[Any], dtype: Dtype) -> bool:
    """Whether nothing was lost when these values, all of them finite, were narrowed."""
    if dtype == "bfloat16":
        return not _halves(values)[..., 0].any()
    return dtype == "float32" or bool((widen(stored, dtype) == values).all())

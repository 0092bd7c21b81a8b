"""How a model's arithmetic is done: in its own dtype, or to match a float32 reference."""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch

from wllm_ray.errors import InvalidInputError

__all__ = ["PRECISIONS", "Precision", "dtype_for", "use_ieee_matmuls"]

Precision: TypeAlias = Literal["native", "matched"]
PRECISIONS: tuple[Precision, ...] = ("native", "matched")


def dtype_for(precision: Precision, dtype: str) -> str:
    """The dtype that a precision asks for: ``matched`` runs the whole model in float32.

    With it everything is IEEE float32: weights, matrix products, and the router of experts, whose
    choice flips with the last bits of its scores.

    Raises:
        InvalidInputError: An unknown precision, or ``matched`` together with another dtype.
    """
    if precision not in PRECISIONS:
        raise InvalidInputError(
            f"precision is 'native' or 'matched', found {precision!r}", code="invalid_argument"
        )
    if precision == "native":
        return dtype
    if dtype not in ("auto", "float32", "float"):
        raise InvalidInputError(
            f"precision 'matched' runs the model in float32, found dtype {dtype!r}; leave dtype "
            "out, or ask for precision 'native'",
            code="invalid_argument",
        )
    return "float32"


def use_ieee_matmuls() -> None:
    """Forbid TF32 and bfloat16 inside float32 matrix products, in this process."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False

"""How a model's arithmetic is asked for."""

import pytest
import torch

from wllm_ray.capture.precision import PRECISIONS, dtype_for, use_ieee_matmuls
from wllm_ray.errors import InvalidInputError

pytestmark = pytest.mark.requirement("C-10")


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_native_is_the_models_own_dtype(dtype):
    assert dtype_for("native", dtype) == dtype


@pytest.mark.parametrize("dtype", ["auto", "float32", "float"])
def test_matched_is_float32(dtype):
    assert dtype_for("matched", dtype) == "float32"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "half"])
def test_matched_in_16_bits_is_a_contradiction(dtype):
    with pytest.raises(InvalidInputError, match=f"found dtype '{dtype}'") as error:
        dtype_for("matched", dtype)
    assert error.value.code == "invalid_argument"


@pytest.mark.parametrize("precision", ["", "Native", "float32", None])
def test_an_unknown_precision_is_refused(precision):
    with pytest.raises(InvalidInputError, match="'native' or 'matched'"):
        dtype_for(precision, "auto")


def test_products_are_those_of_ieee_float32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        use_ieee_matmuls()
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before)
    assert PRECISIONS == ("native", "matched")

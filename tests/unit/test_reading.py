"""What is taken at a place, and how it is put together."""

import pytest
import torch
from torch import nn

from wllm_ray.capture.reading import Part, Place, Reading, Side, follow, take, tensors_in, walk

pytestmark = pytest.mark.requirement("C-4")

PLACE = Place(nn.Identity(), "layers.3", Side.OUTPUT)


def read(*parts, scale=None):
    """A reading of as many parts."""
    return Reading(tuple(Part(PLACE, (i,)) for i in range(len(parts))), 8, 3, scale).combine(parts)


@pytest.mark.parametrize("rows", [[2], [0, 1, 2, 3], [3, 0]])
@pytest.mark.parametrize("shape", [(4, 8), (1, 4, 8), (2, 2, 8)])
def test_what_is_taken_is_memory_of_its_own(shape, rows):
    whole = torch.randn(4, 8)
    output = (None, {"hidden": whole.reshape(shape)})
    taken = take(output, (1, "hidden"), torch.tensor(rows))
    expected = whole[rows].clone()
    whole.zero_()
    assert torch.equal(taken, expected)
    assert taken.shape == (len(rows), 8)


def test_a_vector_that_is_the_same_for_all_is_copied_whole():
    bias = torch.randn(8)
    taken, expected = take([bias], (0,), torch.tensor([1, 2])), bias.clone()
    bias.zero_()
    assert torch.equal(taken, expected)
    rows = torch.randn(2, 8)
    assert torch.equal(read(rows, taken), rows + expected)


@pytest.mark.parametrize("value", [None, 3, "x", torch.arange(4)])
def test_what_is_no_activation_is_refused(value):
    """Token positions have been captured for activations."""
    with pytest.raises(TypeError, match="expected a floating-point tensor"):
        take((value,), (0,), torch.tensor([0]))


@pytest.mark.requirement("C-10")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_and_multiples_are_made_in_the_models_own_dtype_and_order(dtype):
    one, two, three = (torch.randn(64, 32).to(dtype) for _ in range(3))
    found = read(one, two, three, scale=0.3)
    assert found.dtype == dtype
    assert torch.equal(found, ((one + two) + three) * 0.3)
    assert not torch.equal(found, (one + (two + three)) * 0.3)
    assert torch.equal(read(one), one)


def test_tensors_are_found_with_their_paths():
    first, second = torch.ones(1), torch.zeros(2)
    value = (None, [first, {"a": 3, "b": (second,)}])
    assert [path for path, _ in walk(value)] == [(1, 0), (1, 1, "b", 0)]
    assert all(follow(value, path) is tensor for path, tensor in walk(value))
    assert list(tensors_in(value))[1] is second


def test_a_reading_is_told_in_words():
    other = Place(nn.Identity(), "layers.3.mlp", Side.INPUT)
    reading = Reading((Part(PLACE, (0,)), Part(other, (0, 1))), 8, 3)
    assert reading.describe() == "output of layers.3[0] + input of layers.3.mlp[0][1]"
    assert Reading((Part(PLACE, ()),), 8, 3, 0.22).describe() == "(output of layers.3) * 0.22"

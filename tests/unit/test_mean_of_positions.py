"""The mean over tokens is one number, however the values lie in memory."""

import numpy as np
import pytest

from wllm_ray.positions import mean_of


@pytest.mark.requirement("C-8", "D-9")
@pytest.mark.parametrize("width", [1, 2, 5, 130])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_mean_is_added_up_in_token_order(width, order):
    values = np.random.default_rng(0).standard_normal((999, width), np.float32) * np.float32(1e3)
    total = np.zeros(width, np.float32)
    for vector in values:
        total = total + vector
    expected = total / np.float32(len(values))
    assert np.array_equal(mean_of(np.asarray(values, order=order))[0], expected)
    wide = np.concatenate([values, values], axis=1)
    assert np.array_equal(mean_of(wide[:, np.arange(width)])[0], expected)

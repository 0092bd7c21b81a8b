"""Where rounding ends and another row begins: judged by the dtype and by the other rows."""

import numpy as np
import pytest

from wllm_ray.capture.rounding import expect_same_rows, relative_l2
from wllm_ray.errors import CaptureError
from wllm_ray.sites import HookSite

pytestmark = pytest.mark.requirement("C-11")

SITE = HookSite(3, "attn_out")


def rows_apart(apart, nearest):
    """The first of three rows is ``apart`` from itself, and ``nearest`` from the second."""
    alone = np.zeros((3, 8), np.float32)
    alone[0, 0] = 1
    alone[2, 3] = 50
    found = alone.copy()
    found[0, 1] = apart
    alone[1] = found[0]
    alone[1, 2] = nearest
    found[1:] = alone[1:]
    return found, alone


@pytest.mark.parametrize(
    ("dtype", "apart", "nearest"),
    [
        ("float32", 1e-4, 1e-5),
        ("bfloat16", 0.09, 0.01),
        ("float16", 0.04, 0.01),
        ("bfloat16", 0.129, 0.7),
        ("float16", 0.14, 0.7),
    ],
)
def test_rounding_is_told_and_let_through(dtype, apart, nearest):
    found, alone = rows_apart(apart, nearest)
    assert expect_same_rows(SITE, found, alone, dtype) == pytest.approx(apart, rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "apart", "nearest"),
    [
        ("float32", 2e-3, 1.4),
        ("float32", 0.129, 0.7),
        ("bfloat16", 0.129, 0.5),
        ("bfloat16", 0.31, 1.4),
        ("float16", 0.16, 1.4),
        ("float64", 1e-9, 1.4),
        ("bfloat16", np.nan, 1.4),
    ],
)
def test_what_cannot_be_rounding_is_refused(dtype, apart, nearest):
    found, alone = rows_apart(apart, nearest)
    with pytest.raises(CaptureError, match=r"L3_attn_out: .* with dtype float32") as error:
        expect_same_rows(SITE, found, alone, dtype)
    assert error.value.code == "self_test_failed"


def test_every_row_is_judged_and_not_the_farthest_alone():
    found, alone = rows_apart(0.129, 0.5)
    far = np.zeros((1, 8), np.float32)
    far[0, 7] = 100
    farther = far.copy()
    farther[0, 6] = 20  # 0.2, and nothing is near
    with pytest.raises(CaptureError, match=r"1\.29e-01"):
        expect_same_rows(SITE, np.vstack([found, farther]), np.vstack([alone, far]), "bfloat16")


def test_the_same_row_twice_is_no_other_row():
    """One token stands in two prompts: its embedding is not another row's."""
    found, alone = rows_apart(0.129, 0.7)
    found, alone = np.vstack([found, found[:1]]), np.vstack([alone, alone[:1]])
    assert expect_same_rows(SITE, found, alone, "bfloat16") == pytest.approx(0.129)


@pytest.mark.parametrize("count", [1, 4])
def test_without_another_row_nothing_tells_that_more_is_rounding(count):
    alone = np.zeros((count, 8), np.float32)
    alone[:, 0] = 1
    found = alone.copy()
    found[0, 1] = 0.09
    assert expect_same_rows(SITE, found, alone, "bfloat16") == pytest.approx(0.09)
    found[0, 1] = 0.129
    with pytest.raises(CaptureError, match="there is no row of another prompt to tell it from"):
        expect_same_rows(SITE, found, alone, "bfloat16")


@pytest.mark.parametrize(("dtype", "scale"), [("bfloat16", 1.29), ("float16", 1.14)])
def test_what_is_off_at_most_rows_is_no_rounding(dtype, scale):
    """A forgotten multiplier scales every row alike, and leaves other rows far away."""
    alone = 9 * np.eye(5, 8, dtype=np.float32)
    found = alone.copy()
    found[:2] *= scale
    assert expect_same_rows(SITE, found, alone, dtype) == pytest.approx(scale - 1, rel=1e-5)
    found[:3] = scale * alone[:3]
    with pytest.raises(CaptureError, match=rf"the median row's {scale - 1:.2e}, where"):
        expect_same_rows(SITE, found, alone, dtype)


def test_rows_of_neighbours_are_refused_in_16_bits():
    random = np.random.default_rng(0)
    alone = random.standard_normal((6, 32), dtype=np.float32)
    alone += 3 * random.standard_normal(32, dtype=np.float32)  # what all rows have in common
    assert relative_l2(np.roll(alone, 1, axis=0), alone).min() > 0.1
    with pytest.raises(CaptureError, match="attributed wrongly"):
        expect_same_rows(SITE, np.roll(alone, 1, axis=0), alone, "bfloat16")

"""The text of a position and the tokens that it names."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wllm_ray.errors import InvalidInputError
from wllm_ray.positions import (
    POSITION_KINDS,
    canonical_position,
    feature_rows_of,
    is_reduced,
    only_last,
    position_kind,
    resolve,
)

pytestmark = pytest.mark.requirement("C-8")


@pytest.mark.parametrize(
    ("given_", "text"),
    [
        ("last_prompt", "last_prompt"),
        ("last-prompt", "last_prompt"),
        ("all_generated", "all_generated"),
        ("index:0,-1", "index:0,-1"),
        ("index: 3, 0", "index:3,0"),
        ({"index": [0, -1]}, "index:0,-1"),
        ({"index": (7,)}, "index:7"),
    ],
)
def test_each_spelling_has_one_text(given_, text):
    assert canonical_position(given_) == text
    assert canonical_position(text) == text


@pytest.mark.parametrize(
    "given_",
    [
        "",
        "last",
        "index",
        "index:",
        "index:1,",
        "index:1.0",
        "index:+1",
        "index:01",
        "index:1;2",
        "index:1,1",
        "index:1,01",
        "index:9999999999",
        "index:٣",
        "INDEX:1",
        None,
        3,
        ["index", 0],
        {"index": []},
        {"index": 0},
        {"index": [True]},
        {"index": [0.0]},
        {"index": ["0"]},
        {"index": [2, 2]},
        {"index": [0], "more": 1},
        {"index": [10**9]},
        {"index": list(range(4097))},
        {"last_prompt": []},
    ],
)
def test_what_is_no_position_is_refused(given_):
    with pytest.raises(InvalidInputError) as error:
        canonical_position(given_)
    assert error.value.code == "invalid_position"


@given(st.lists(st.integers(-(10**9) + 1, 10**9 - 1), min_size=1, max_size=20, unique=True))
def test_text_and_object_are_one(indices):
    text = canonical_position({"index": indices})
    assert canonical_position(text) == text
    assert position_kind(text) == "index"
    assert [int(one) for one in text.removeprefix("index:").split(",")] == indices


@given(
    st.integers(1, 50),
    st.lists(st.integers(-60, 60), min_size=1, max_size=8, unique=True),
)
def test_indices_are_pythons_own(tokens, indices):
    text = canonical_position({"index": indices})
    if all(-tokens <= one < tokens for one in indices):
        expected = np.arange(tokens)[indices]
        found = resolve(text, tokens)
        assert found.dtype == np.int64
        assert np.array_equal(found, expected)
        assert feature_rows_of(text, tokens) == len(expected)
    else:
        first = next(one for one in indices if not -tokens <= one < tokens)
        with pytest.raises(InvalidInputError, match=f"index {first} is outside a row") as error:
            resolve(text, tokens)
        assert error.value.code == "position_out_of_range"


@pytest.mark.parametrize("tokens", [1, 7])
def test_names(tokens):
    everything = list(range(tokens))
    assert resolve("last_prompt", tokens).tolist() == [tokens - 1]
    assert resolve("first", tokens).tolist() == [0]
    assert resolve("all_prompt", tokens).tolist() == everything
    assert resolve("mean_prompt", tokens).tolist() == everything
    assert feature_rows_of("all_prompt", tokens) == tokens
    assert [feature_rows_of(name, tokens) for name in ("last_prompt", "first", "mean_prompt")] == [
        1
    ] * 3
    assert feature_rows_of("all_generated", tokens) is None
    for name in ("all_generated", "last_generated"):
        with pytest.raises(InvalidInputError) as error:
            resolve(name, tokens)
        assert error.value.code == "invalid_position"


def test_two_names_for_one_token_are_listed_twice():
    assert resolve("index:0,-1", 1).tolist() == [0, 0]


@pytest.mark.requirement("C-7")
def test_only_these_read_the_last_token_alone():
    texts = [
        *(kind for kind in POSITION_KINDS if kind != "index"),
        "index:-1",
        "index:0",
        "index:-1,0",
    ]
    assert [text for text in texts if only_last(text)] == ["last_prompt", "index:-1"]
    assert [text for text in texts if is_reduced(text)] == ["mean_prompt"]

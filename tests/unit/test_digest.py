"""Canonical JSON and digests: values made by hand, by hashlib and by the json module."""

from __future__ import annotations

import enum
import hashlib
import json
import re
import struct
from collections import OrderedDict
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wllm_ray.digest import (
    canonical_json,
    canonical_text,
    joined_request_digest,
    parse_json,
    request_digest,
    requests_digest,
    rows_digest,
    sha256_hex,
    token_digest,
    token_digests,
)
from wllm_ray.errors import InvalidInputError

pytestmark = pytest.mark.requirement("D-1")

BY_HAND = [
    (None, b"null"),
    (True, b"true"),
    (1, b"1"),
    (1.0, b"1.0"),
    (-0.0, b"-0.0"),
    (1e16, b"1e+16"),
    (0.1, b"0.1"),
    (5e-324, b"5e-324"),
    ("é🙂\u2028/", '"é🙂\u2028/"'.encode()),
    ('"\\\b\f\n\r\t\0\x1f\x7f', b'"\\"\\\\\\b\\f\\n\\r\\t\\u0000\\u001f\x7f"'),
    ("\ud83d", b'"\\ud83d"'),
    ([], b"[]"),
    ((1, [2]), b"[1,[2]]"),
    ({}, b"{}"),
    ({"b": 1, "a": 2, "B": 3, "é": 4}, '{"B":3,"a":2,"b":1,"é":4}'.encode()),
]


@pytest.mark.parametrize(("value", "expected"), BY_HAND)
def test_canonical_json_by_hand(value, expected):
    assert canonical_json(value) == expected


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=[])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(json_values)
def test_what_is_written_is_read_and_written_the_same(value):
    data = canonical_json(value)
    assert canonical_json(parse_json(data)) == data
    assert json.loads(data) == parse_json(data)


@given(json_values)
def test_canonical_json_is_what_the_json_module_writes_but_for_lone_surrogates(value):
    text = json.dumps(
        value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), allow_nan=False
    )
    expected = re.sub("[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)
    assert canonical_text(value) == expected
    assert canonical_json(value) == expected.encode()


class Colour(enum.StrEnum):
    RED = "r"


class Loud(int):
    def __repr__(self):
        return "loud"

    __str__ = __repr__


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Colour.RED, b'"r"'),
        ({Colour.RED: Colour.RED}, b'{"r":"r"}'),
        ([Loud(7), 8], b"[7,8]"),
        (np.float64(0.1), b"0.1"),
        (MappingProxyType({"b": 1, "a": OrderedDict(c=2)}), b'{"a":{"c":2},"b":1}'),
        ([1, True, 10**5000], b"[1,true,1" + b"0" * 5000 + b"]"),
        ([1, -(10**5000)], b"[1,-1" + b"0" * 5000 + b"]"),
    ],
)
def test_subclasses_and_long_integers_are_written_as_their_base(value, expected):
    assert canonical_json(value) == expected


@pytest.mark.parametrize("key", [1, 1.0, True, None, b"a", ("a",)])
def test_keys_are_text(key):
    """The json module would make text of them, and "1" of both 1 and "1"."""
    with pytest.raises(TypeError):
        canonical_json({key: 0})
    with pytest.raises(TypeError):
        canonical_json({"a": [{"b": 0, key: 0}]})


@given(st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text())
def test_scalars_survive_exactly(value):
    assert repr(parse_json(canonical_json(value))) == repr(value)  # tells 0.0 from -0.0


def test_integers_of_any_size_survive():
    for digits in (30, 4_000, 5_000, 20_000):
        text = "-" + "7" * digits
        value = parse_json(text)
        assert isinstance(value, int)
        assert canonical_json([value]) == b"[" + text.encode() + b"]"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), [float("nan")]])
def test_values_that_json_does_not_have(value):
    with pytest.raises(InvalidInputError, match="no JSON form") as error:
        canonical_json(value)
    assert error.value.code == "invalid_json"


@pytest.mark.parametrize("value", [b"x", {1}, object(), np.float32(1)])
def test_types_that_json_does_not_have(value):
    with pytest.raises(TypeError, match="no canonical JSON form"):
        canonical_json(value)


@pytest.mark.requirement("L-6")
@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b'{"a":1,"a":1}', "key 'a' occurs twice"),
        (b'{"x":{"\\u0061":1,"a":1}}', "key 'a' occurs twice"),
        (b"[NaN]", "NaN is not JSON"),
        (b"[-Infinity]", "-Infinity is not JSON"),
        (b"[1e400]", "does not fit a 64-bit float"),
        (b"\xff\xfe", "not UTF-8: byte 0"),
        (b"{'a':1}", "not JSON: .* at line 1, column 2"),
        (b"", "not JSON"),
        (b"1 2", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_not_strict_json(data, match):
    with pytest.raises(InvalidInputError, match=match) as error:
        parse_json(data)
    assert error.value.code == "invalid_json"


def test_a_byte_order_mark_is_not_json():
    """Where one is allowed, at the beginning of an input file, its reader drops it."""
    with pytest.raises(InvalidInputError, match=r"not JSON: .*BOM"):
        parse_json(b'\xef\xbb\xbf{"a":1}')


def test_the_message_never_quotes_the_text():
    with pytest.raises(InvalidInputError) as error:
        parse_json('{"secret prompt')
    assert "secret" not in str(error.value)


def test_token_digest_by_hand():
    expected = hashlib.sha256(struct.pack("<3I", 1, 2, 2**31 - 1)).hexdigest()
    assert token_digest([1, 2, 2**31 - 1]) == expected
    assert token_digest(np.array([1, 2, 2**31 - 1], np.int32)) == expected
    assert token_digest(np.array([1, 2, 2**31 - 1], ">i8")) == expected
    assert token_digest([]) == hashlib.sha256(b"").hexdigest()


@pytest.mark.parametrize(
    "odd", [np.arange(8, dtype=np.int32)[::2], np.array([1, 2], ">i4"), np.array([1, 2], np.int64)]
)
def test_digests_of_many_rows_are_those_of_each(odd):
    plain = [np.array([1, 2, 2**31 - 1], np.int32), None, np.empty(0, np.int32)]
    for rows in (plain, [*plain, odd]):
        expected = [
            None if ids is None else hashlib.sha256(ids.astype("<u4").tobytes()).hexdigest()
            for ids in rows
        ]
        assert token_digests(rows) == expected


def test_request_digest_by_hand():
    text = b'{"content":{"prompt":"p"},"id":"i","identity":{"m":1},"metadata":{}}'
    found = request_digest(row_id="i", content={"prompt": "p"}, metadata={}, identity={"m": 1})
    assert found == hashlib.sha256(text).hexdigest()
    assert joined_request_digest("i", {"prompt": "p"}, "{}", '{"m":1}') == found


@given(st.text(st.characters(exclude_categories=[])), json_values, json_values)
def test_request_digest_is_over_the_canonical_json_of_all_of_it(text, metadata, identity):
    content = {"prompt": text}
    whole = {"content": content, "id": text, "identity": identity, "metadata": metadata}
    found = request_digest(row_id=text, content=content, metadata=metadata, identity=identity)
    assert found == sha256_hex(canonical_json(whole))


def test_request_digest_tells_apart_what_must_be():
    base = {"row_id": "i", "content": {"prompt": "p"}, "metadata": {"n": 1}, "identity": {}}
    changes = (
        {},
        {"row_id": "j"},
        {"content": {"prompt": "q"}},
        {"content": {"token_ids": [1]}},
        {"metadata": {"n": 1.0}},
        {"metadata": {"n": True}},
        {"identity": {"position": "first"}},
        {"row_id": "e\u0301"},
        {"row_id": "\u00e9"},
    )
    assert len({request_digest(**(base | change)) for change in changes}) == len(changes)


def test_digests_over_rows_by_hand():
    first, second = sha256_hex(b"1"), sha256_hex(b"2")
    raw = bytes.fromhex(first) + bytes.fromhex(second)
    assert requests_digest([first, second]) == hashlib.sha256(raw).hexdigest()
    assert requests_digest([]) == hashlib.sha256(b"").hexdigest()
    text = f'["{first}","{second}","ok"]\n["{second}",null,"too_long"]\n'.encode()
    found = rows_digest([(first, second, "ok"), (second, None, "too_long")])
    assert found == hashlib.sha256(text).hexdigest()


@pytest.mark.requirement("L-6")
@pytest.mark.parametrize("digits", [3999, 4000, 4301, 65_536])
@pytest.mark.parametrize("sign", ["", "-"])
def test_long_integers_keep_every_digit_both_ways(digits, sign):
    text = sign + "1" + "0" * (digits - 2 - len(sign)) + "7"
    value = parse_json(text)
    assert isinstance(value, int)
    assert value % 10**9 == int(text[-9:]) if not sign else True
    assert canonical_json(value) == text.encode()


def test_an_integer_that_no_metadata_could_hold_is_refused_at_once():
    with pytest.raises(InvalidInputError, match="an integer of 1000000 digits"):
        parse_json('{"a":' + "9" * 1_000_000 + "}")


def test_a_repeated_key_among_many_is_found_at_once():
    text = "{" + ",".join(f'"k{n}":1' for n in range(200_000)) + ',"k199999":2}'
    with pytest.raises(InvalidInputError, match="key 'k199999' occurs twice"):
        parse_json(text)

"""The short way through a line of JSONL says what the long way says, or nothing."""

import io
import json
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from wllm_ray import rows
from wllm_ray.records import InputRow
from wllm_ray.rows import read_jsonl
from wllm_ray.usual_rows import MAX_ID_BYTES, usual_row

pytestmark = pytest.mark.requirement("L-6")


def long_way(line: bytes):
    """What is read without the module that is tested here; the message of what cannot be read."""
    with mock.patch.object(rows, "usual_row", return_value=None):
        found = [item for _, item in read_jsonl(io.BytesIO(line + b"\n"))]
    return found[0] if found else None


ODD_TEXTS = ["\\", '"', '\\"', "\x7f", "\u2028", "\U0001f600", "é"]
TEXTS = st.text(max_size=4) | st.sampled_from(ODD_TEXTS)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([2**63, -(2**63), 2**64, -(2**63) - 1, 10**30])
    | st.floats(allow_nan=True)
    | st.sampled_from([0.0, -0.0, 1.0, 1e16, 1e300])
    | TEXTS
)
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(TEXTS, SCALARS, max_size=2)
METADATA = st.dictionaries(TEXTS, SCALARS, max_size=4)
MEMBERS = {"id": TEXTS | VALUES, "prompt": TEXTS | VALUES, "metadata": METADATA | VALUES}
PAIRS = st.lists(
    st.one_of(*(st.tuples(st.just(key), value) for key, value in MEMBERS.items()))
    | st.tuples(st.sampled_from(["id", "prompt", "metadata", "token_ids", "é"]), VALUES),
    max_size=2,
)
USUAL = st.fixed_dictionaries(
    {"id": st.just("r"), "prompt": TEXTS}, optional={"metadata": METADATA}
).map(lambda row: list(row.items()))


@st.composite
def lines(draw) -> bytes:
    """Rows, with members that occur twice, written in every spelling; some of them damaged."""
    pairs = draw(st.permutations([*draw(USUAL), *draw(PAIRS | st.just([]))]))
    ascii_only = draw(st.booleans())
    comma, colon = draw(st.sampled_from([(",", ":"), (", ", ": "), (" ,\t", " :")]))
    text = comma.join(
        json.dumps(key, ensure_ascii=ascii_only)
        + colon
        + json.dumps(value, ensure_ascii=ascii_only, separators=(comma, colon))
        for key, value in pairs
    )
    line = f"{{{text}}}".encode(errors="surrogatepass")
    if draw(st.booleans()):
        return line
    at = draw(st.integers(0, len(line)))
    cut = draw(st.integers(0, 2))
    more = draw(st.sampled_from([b"", b"\\", b'"', b"0", b"-0", b"01", b".0", b"e3", b"1E400"]))
    more = draw(st.just(more) | st.binary(max_size=2))
    return (line[:at] + more + line[at + cut :]).replace(b"\n", b" ")


def of(metadata: bytes) -> bytes:
    return b'{"id":"a","prompt":"x","metadata":' + metadata + b"}"


@given(lines())
@example(of(b'{"n":1.0}'))
@example(of(b'{"n":1e3}'))
@example(of(b'{"n":-0}'))
@example(of(b'{"n":-0.0}'))
@example(of(b'{"n":01}'))
@example(of(b'{"n":18446744073709551616}'))
@example(of(b'{"n":1,"n":"x"}'))
@example(of(b'{"k":"\\ud83d"}'))
@example(of(b'{"k":"\\ud83d\\ude00"}'))
@example(of(b'{"k":"\\u0000\\/"}'))
@example(of(b'{"k":"\x01"}'))
@example(of(b'{"k":"\x7f"}'))
@example(of(b'{"k":"\xed\xa0\x80"}'))
@example(of(b'{"k":"\xff"}'))
@example(of(b'{"b":1,"\xc3\xa9":2,"a":3,"\xf0\x9f\x98\x80":4,"\xef\xbf\xbd":5}'))
@example(of(b'{"k":"a\\\\","l":"\\"\\\\\\""}'))
@example(of(b"{}") + b" x")
@example(b'{"id":"a","prompt":"x","prompt":"y"}')
@example(b'{"id":"a","prompt":"x","metadata":{},"metadata":{}}')
@example(b'{"id":"a","prompt":"x","metadata":{"k":"v"},"metadata":{}}')
@example(b'{"id":"a","prompt":"\\\\","id":"\\""}')
@settings(max_examples=2000)
def test_what_is_read_is_what_the_long_way_reads(line):
    expected = long_way(line)
    assert usual_row(line) in (None, expected)


@pytest.mark.parametrize(
    "line",
    [
        b'{"id": "r-1", "prompt": "The city", "metadata": {"label": 1, "topic": "cities"}}',
        b'{"prompt":"a\\nb \\"c\\" \\\\","id":"r"}',
        '{"id":"r","prompt":"行 é","metadata":{"é":null,"b":true}}'.encode(),
        b'{"id":"r","prompt":"","metadata":{}}',
        b'{"id":"' + b"i" * MAX_ID_BYTES + b'","prompt":"x"}',
    ],
)
def test_usual_rows_are_read_the_short_way(line):
    found = usual_row(line)
    assert isinstance(found, InputRow)
    assert found == long_way(line)


@pytest.mark.parametrize(
    "line",
    [
        b'{"id":"r","token_ids":[1]}',
        b'{"id":"r","messages":[]}',
        b'{"id":"\xc3\xa9","prompt":"x"}',
        b'{"id":"' + b"i" * (MAX_ID_BYTES + 1) + b'","prompt":"x"}',
        of(b'{"n":0.5}'),
        of(b'{"k":"' + b"x" * 5000 + b'"}'),
        of(b'{"k":"\\n"}'),
        b"",
    ],
)
def test_all_others_are_left_to_the_long_way(line):
    assert usual_row(line) is None


def test_lines_are_counted_whichever_way_they_are_read():
    usual, other = b'{"id":"a","prompt":"x"}', b'{"id":"b","token_ids":[1]}'
    data = b"\xef\xbb\xbf" + usual + b"\r\n\n" + other + b"\n" + usual
    assert [line for line, _ in read_jsonl(io.BytesIO(data))] == [1, 3, 4]

"""Input rules (L-6): what refuses a whole input, and what fails one row only (C-16)."""

import io
import json

import pytest

from tests.fakes import MAX_MODEL_LEN, VOCAB_SIZE, FakeTokenizer
from wllm_ray.digest import canonical_text, parse_json
from wllm_ray.errors import InvalidInputError
from wllm_ray.records import CaptureIdentity, InputRow
from wllm_ray.rows import MAX_LISTED_PROBLEMS, parse_objects, parse_rows, read_jsonl
from wllm_ray.tokens import TokenLimits, make_records, tokenize_rows

IDENTITY = CaptureIdentity(
    model_revision="m",
    tokenizer_revision="t",
    chat_template_sha256=None,
    sites=("L0_resid_post",),
    position="last_prompt",
    capture_mode="replay",
)
LIMITS = TokenLimits(MAX_MODEL_LEN, VOCAB_SIZE)


def parse(data: bytes) -> list[InputRow]:
    return parse_rows(read_jsonl(io.BytesIO(data)))


def problems_of(data: bytes) -> list[tuple[int, str]]:
    with pytest.raises(InvalidInputError) as caught:
        parse(data)
    assert caught.value.code == "invalid_rows"
    return [(one["line"], one["message"]) for one in caught.value.details["problems"]]


def line(**row) -> bytes:
    return json.dumps({"id": "a", "prompt": "x"} | row).encode() + b"\n"


def nested(depth: int) -> dict:
    value: dict = {}
    for _ in range(depth - 1):
        value = {"k": value}
    return value


GOOD = b'{"id":"a","prompt":"x"}'

# --- lines ----------------------------------------------------------------------------------------


@pytest.mark.requirement("L-6")
@pytest.mark.parametrize(
    "data",
    [
        GOOD,
        GOOD + b"\n",
        GOOD + b"\r\n",
        b"\xef\xbb\xbf" + GOOD,
        b"\xef\xbb\xbf\n" + GOOD,
        b"\n  \t\r\n" + GOOD + b"\n\n",
    ],
    ids=["no newline", "lf", "crlf", "bom", "bom alone", "blank lines"],
)
def test_line_ends_bom_and_blank_lines_change_nothing(data):
    assert parse(data) == [InputRow("a", {"prompt": "x"})]


@pytest.mark.requirement("L-6")
def test_blank_lines_are_counted_so_that_line_numbers_stay_true():
    assert problems_of(b"\n\n" + GOOD + b"\n\n[]\n")[0][0] == 5


@pytest.mark.requirement("L-6")
@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c"])
def test_only_a_newline_ends_a_line(character):
    data = json.dumps({"id": "a", "prompt": f"x{character}y"}, ensure_ascii=character < " ")
    rows = parse(data.encode())
    assert rows[0].content["prompt"] == f"x{character}y"


def test_a_bom_is_dropped_at_the_beginning_only():
    assert problems_of(GOOD + b"\n\xef\xbb\xbf" + GOOD)[0][0] == 2


@pytest.mark.requirement("L-6")
@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"id":"\xff","prompt":"x"}', "not UTF-8: byte 7"),
        (b'{"id":"a","prompt":"\xed\xa0\xbd"}', "not UTF-8"),
        (b"{", "not JSON"),
        (b'"text"', "a row must be a JSON object, found str"),
        (b"[]", "found list"),
        (b"null", "found NoneType"),
        (b'{"id":"a","id":"b","prompt":"x"}', "key 'id' occurs twice"),
        (b'{"id":"a","prompt":"x","metadata":{"k":1,"k":1}}', "key 'k' occurs twice"),
        (b'{"id":"a","prompt":"x","metadata":{"k":NaN}}', "NaN is not JSON"),
        (b'{"id":"a","prompt":"x","metadata":{"k":-Infinity}}', "-Infinity is not JSON"),
        (b'{"id":"a","prompt":"x","metadata":{"k":1e999}}', "does not fit a 64-bit float"),
        (b"[" * 100_000, "not JSON: nested too deeply"),
    ],
    ids=lambda value: None if isinstance(value, str) else repr(value[:20]),
)
def test_a_line_that_is_not_strict_json_is_an_input_error(data, message):
    ((number, found),) = problems_of(GOOD.replace(b'"a"', b'"first"') + b"\n" + data)
    assert number == 2
    assert message in found


# --- fields ---------------------------------------------------------------------------------------


@pytest.mark.requirement("L-6")
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"id": 7}, "`id` must be a non-empty string, found int"),
        ({"id": None}, "found NoneType"),
        ({"id": ""}, "`id` must be a non-empty string"),
        ({"id": "é" * 256 + "x"}, "at most 512 bytes of UTF-8, found 513"),
        ({"id": "\ud83d"}, "half of a surrogate pair"),
        ({"prompt": 1}, "`prompt` must be a string"),
        ({"prompt": None}, "`prompt` must be a string"),
        (
            {"messages": []},
            "exactly one of prompt, messages, token_ids is needed, found prompt, me",
        ),
        ({"text": "x"}, "unknown field 'text'"),
        ({"metadata": []}, "`metadata` must be an object, found list"),
        ({"metadata": None}, "`metadata` must be an object, found NoneType"),
        ({"metadata": {"k": "x" * 65536}}, "`metadata` must be at most 65536 bytes of JSON"),
        ({"metadata": nested(33)}, "nested more than 32 deep"),
        ({"metadata": {"k": [[]] and nested(32)}}, "nested more than 32 deep"),
    ],
)
def test_a_field_that_breaks_the_rules_is_named(row, message):
    ((number, found),) = problems_of(line(**row))
    assert number == 1
    assert message in found


@pytest.mark.requirement("L-6")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "found none"),
        ({"messages": "x"}, "`messages` must be a list of objects"),
        ({"messages": ["x"]}, "`messages` must be a list of objects"),
        ({"messages": [{"role": "user", "content": nested(31)}]}, "nested at most 32 deep"),
        ({"messages": [{"role": "user", "content": nested(900)}]}, "nested at most 32 deep"),
        ({"token_ids": [1.0]}, "`token_ids` must be a list of integers"),
        ({"token_ids": [True]}, "`token_ids` must be a list of integers"),
        ({"token_ids": "1"}, "`token_ids` must be a list of integers"),
    ],
)
def test_content_must_be_one_thing_of_its_type(content, message):
    ((_, found),) = problems_of(json.dumps({"id": "a"} | content).encode())
    assert message in found


def test_a_missing_id_is_named():
    assert problems_of(b'{"prompt":"x"}') == [(1, "`id` is missing")]


@pytest.mark.requirement("L-6")
def test_a_repeated_id_names_both_lines():
    assert problems_of(GOOD + b"\n\n" + GOOD) == [(3, "`id` was used before, on line 1")]


@pytest.mark.requirement("L-6")
def test_ids_are_compared_as_they_are_and_never_normalised():
    composed, decomposed = "\u00e9", "e\u0301"
    rows = parse(line(id=composed) + line(id=decomposed) + line(id="A") + line(id="a"))
    assert [row.id for row in rows] == [composed, decomposed, "A", "a"]


@pytest.mark.requirement("L-6")
@pytest.mark.parametrize("row", [{"id": "é" * 256}, {"metadata": nested(32)}])
def test_values_at_the_bound_are_taken(row):
    assert parse(line(**row))


def test_metadata_of_exactly_64_kib_is_taken():
    assert parse(line(metadata={"k": "x" * (65536 - len('{"k":""}'))}))


@pytest.mark.requirement("L-6")
def test_every_offending_line_is_listed_and_nothing_is_returned():
    data = b"".join(line(id=f"r{n}", prompt=n) for n in range(70))
    with pytest.raises(InvalidInputError, match="70 malformed rows, nothing was run") as caught:
        parse(data)
    assert caught.value.details["count"] == 70
    assert len(caught.value.details["problems"]) == MAX_LISTED_PROBLEMS
    assert "and 20 more" in caught.value.message


@pytest.mark.requirement("L-6")
@pytest.mark.parametrize("data", [b"", b"\n \n", b"\xef\xbb\xbf"])
def test_no_rows_at_all_is_an_error(data):
    with pytest.raises(InvalidInputError, match="holds no rows") as caught:
        parse(data)
    assert caught.value.code == "no_rows"


@pytest.mark.requirement("L-6")
def test_messages_never_quote_the_prompt():
    data = b'{"id":"a","prompt":"SECRET","extra":1}\n{"id":"b","prompt":"SECRET"'
    with pytest.raises(InvalidInputError) as caught:
        parse(data)
    assert "SECRET" not in str(caught.value)
    assert "SECRET" not in json.dumps(caught.value.details)


def test_objects_follow_the_same_rules_with_their_position_as_the_line():
    with pytest.raises(InvalidInputError, match="line 2: `id` was used before, on line 1"):
        parse_objects([{"id": "a", "prompt": ""}, {"id": "a", "prompt": ""}])


@pytest.mark.parametrize(
    ("metadata", "message"),
    [({"k": float("nan")}, "NaN and Infinity"), ({"k": object()}, "JSON cannot say (object")],
)
def test_objects_that_json_cannot_say_are_listed_like_any_problem(metadata, message):
    row = {"prompt": "", "metadata": metadata}
    with pytest.raises(InvalidInputError) as caught:
        parse_objects([{"id": "a"} | row, {"id": "b", "prompt": 1}])
    problems = caught.value.details["problems"]
    assert [one["line"] for one in problems] == [1, 2]
    assert message in problems[0]["message"]


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.requirement("L-6")
@pytest.mark.parametrize("digits", [20, 4300, 4301, 20_000])
def test_integers_of_any_size_reach_metadata_and_digest(digits):
    number = b"9" * digits
    row = parse(b'{"id":"a","prompt":"x","metadata":{"n":' + number + b"}}")[0]
    less = InputRow("a", {"prompt": "x"}, canonical_text({"n": row.metadata["n"] - 1}))
    record, other = make_records([row, less], IDENTITY)
    assert record.metadata_json == '{"n":' + number.decode() + "}"
    assert other.request_digest != record.request_digest


@pytest.mark.requirement("L-6")
def test_one_and_one_point_zero_stay_apart():
    rows = [parse(line(metadata=value))[0] for value in ({"n": 1}, {"n": 1.0})]
    whole, real = make_records(rows, IDENTITY)
    assert (whole.metadata_json, real.metadata_json) == ('{"n":1}', '{"n":1.0}')
    assert whole.request_digest != real.request_digest


@pytest.mark.requirement("L-6")
def test_the_order_of_keys_does_not_change_a_digest():
    first = parse(b'{"id":"a","prompt":"x","metadata":{"a":1,"b":2}}')[0]
    second = parse(b'{"metadata":{"b":2,"a":1},"prompt":"x","id":"a"}')[0]
    digests = {row.request_digest for row in make_records([first, second], IDENTITY)}
    assert len(digests) == 1


# --- rows that cannot be run ----------------------------------------------------------------------


def records_of(*contents: dict, tokenizer: FakeTokenizer | None = None):
    rows = [InputRow(f"r{n}", content) for n, content in enumerate(contents)]
    return tokenize_rows(rows, tokenizer or FakeTokenizer(), IDENTITY, LIMITS, first_index=10)


USER = {"role": "user", "content": "x"}


@pytest.mark.requirement("C-16")
@pytest.mark.parametrize(
    ("content", "code", "message"),
    [
        ({"prompt": ""}, "empty_prompt", "`prompt` is empty"),
        ({"messages": []}, "empty_prompt", "`messages` is empty"),
        ({"token_ids": []}, "zero_tokens", "no tokens"),
        ({"prompt": "\0"}, "zero_tokens", "no tokens"),
        ({"prompt": "x" * 65}, "too_long", "65 tokens and the model takes 64"),
        ({"token_ids": [0] * 65}, "too_long", "65 tokens and the model takes 64"),
        ({"token_ids": [0, 256]}, "token_out_of_vocabulary", "id 256 at position 1 is outside 0"),
        ({"token_ids": [-1]}, "token_out_of_vocabulary", "token id -1"),
        ({"token_ids": [2**31]}, "token_out_of_vocabulary", "token id 2147483648"),
        ({"token_ids": [10**5000]}, "token_out_of_vocabulary", "too large to print"),
        ({"prompt": "x\ud83d"}, "lone_surrogate", "half of a surrogate pair"),
        ({"messages": [USER | {"content": "\udc00"}]}, "lone_surrogate", "half of a surrogate"),
        ({"messages": [USER | {"role": "tool"}]}, "chat_template_error", "(KeyError)"),
    ],
)
def test_a_row_that_cannot_be_run_fails_alone(content, code, message):
    before, failed, after = records_of({"prompt": "a"}, content, {"prompt": "b"})
    assert failed.failure is not None
    assert (failed.failure.code, failed.failure.permanent) == (code, True)
    assert failed.failure.stage == "tokenize"
    assert message in failed.failure.message
    assert failed.token_ids is None
    assert before.token_ids.tolist() == [97]
    assert after.token_ids.tolist() == [98]
    assert [row.index for row in (before, failed, after)] == [10, 11, 12]


@pytest.mark.requirement("C-16")
def test_messages_without_a_template_fail_and_prompts_do_not():
    tokenizer = FakeTokenizer(has_template=False)
    chat, plain = records_of({"messages": [USER]}, {"prompt": "a"}, tokenizer=tokenizer)
    assert chat.failure.code == "no_chat_template"
    assert plain.failure is None


@pytest.mark.requirement("L-6", "C-16")
def test_a_prompt_of_exactly_the_models_length_works():
    (row,) = records_of({"prompt": "x" * MAX_MODEL_LEN})
    assert len(row.token_ids) == MAX_MODEL_LEN


def test_the_templates_own_words_do_not_leave():
    (row,) = records_of({"messages": [{"role": "SECRET", "content": "SECRET"}]})
    assert "SECRET" not in row.failure.message


def test_lone_surrogates_in_metadata_are_carried_as_escapes():
    row = parse(b'{"id":"a","prompt":"x","metadata":{"k":"\\ud83d"}}')[0]
    text = next(make_records([row], IDENTITY)).metadata_json
    assert text == '{"k":"\\ud83d"}'
    assert parse_json(text) == row.metadata

"""One line for each wrong field, in the words of its description."""

import pytest

from wllm_ray.errors import InvalidInputError
from wllm_ray.requests import read_request
from wllm_ray.validation import unknown_field

NUMBER_OR_AUTO = "expected a whole number from 1 to 4096, or 'auto', found "


@pytest.mark.requirement("H-7")
@pytest.mark.parametrize(
    ("change", "field", "message"),
    [
        ({"batch_size": 5000}, "batch_size", NUMBER_OR_AUTO + "5000"),
        ({"batch_size": "SECRET"}, "batch_size", NUMBER_OR_AUTO + "a string"),
        ({"batch_size": True}, "batch_size", NUMBER_OR_AUTO + "true"),
        ({"model": None}, "model", "expected a string, found null"),
        ({"model": 10**5000}, "model", "expected a string, found a int"),
        ({"sites": ["a", 1]}, "sites.1", "expected a string, found 1"),
        ({"rows": {}}, "rows", "expected a list, found an object"),
        ({"persistence": "no"}, "persistence", "expected one of 'none', 'dataset', 'full_trace', "),
        ({"lyers": [1]}, "lyers", "unknown field 'lyers'; did you mean 'layers'? The fields are"),
    ],
)
def test_a_wrong_field_is_described_once_and_no_text_is_quoted(change, field, message):
    with pytest.raises(InvalidInputError) as caught:
        read_request({"model": "m", "rows": [], **change})
    (problem,) = caught.value.details["problems"]
    assert problem["field"] == field
    assert problem["message"].startswith(message)
    assert "SECRET" not in caught.value.message


@pytest.mark.parametrize(
    ("body", "said"), [([], "body: expected an object, found a list"), ({}, "model: is missing")]
)
def test_what_is_no_request_at_all_is_told(body, said):
    with pytest.raises(InvalidInputError, match=said):
        read_request(body)


def test_a_field_that_resembles_none_lists_them_all():
    assert unknown_field("zzz", ["a", "b"]) == "unknown field 'zzz'. The fields are a, b"

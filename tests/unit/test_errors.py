"""The exception tree: codes, second bases, and the way across a process border."""

from __future__ import annotations

import pickle
import re

import pytest

from wllm_ray import errors
from wllm_ray.errors import ERROR_CODES, ROW_FAILURE_CODES, WLLMError
from wllm_ray.records import RowFailure

pytestmark = pytest.mark.requirement("H-7")

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, WLLMError)
]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_has_a_listed_default_code_and_its_place_in_the_drawing(kind):
    error = kind("expected x, found y")
    assert error.code in ERROR_CODES
    assert str(error) == error.message == "expected x, found y"
    assert kind.__name__ in errors.__doc__
    assert kind.__name__ in errors.__all__


@pytest.mark.parametrize("kind", CLASSES)
def test_everything_survives_pickling(kind):
    error = kind("m", code="storage_failed", stage="verify", details={"file": "x"})
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert again.to_json() == error.to_json()
    assert again.to_json() == {
        "error": {
            "code": "storage_failed",
            "message": "m",
            "stage": "verify",
            "details": {"file": "x"},
        }
    }


@pytest.mark.parametrize(
    ("kind", "base", "status"),
    [
        (errors.InvalidInputError, ValueError, 422),
        (errors.NotOfferedError, errors.InvalidInputError, 422),
        (errors.NotFoundError, LookupError, 404),
        (errors.ConflictError, WLLMError, 409),
        (errors.TooLargeError, WLLMError, 413),
        (errors.UnauthorizedError, PermissionError, 401),
        (errors.UnavailableError, WLLMError, 503),
        (errors.StorageError, OSError, 500),
        (errors.AlreadyExistsError, FileExistsError, 500),
        (errors.IntegrityError, ValueError, 500),
    ],
)
def test_second_bases_and_status(kind, base, status):
    assert issubclass(kind, base)
    assert kind.http_status == status


def test_a_code_that_is_not_listed_is_a_bug():
    with pytest.raises(KeyError, match="'no_such_code' is not in ERROR_CODES"):
        WLLMError("m", code="no_such_code")


def test_details_are_never_shared():
    first, second = WLLMError("a"), WLLMError("b")
    first.details["x"] = 1
    assert second.details == {}


def test_codes_are_words_with_a_sentence():
    for code, text in ERROR_CODES.items():
        assert re.fullmatch(r"[a-z_]+", code)
        assert text.endswith(".")


@pytest.mark.requirement("D-10")
@pytest.mark.parametrize("code", ROW_FAILURE_CODES)
def test_row_failures_take_stage_and_permanence_from_the_table(code):
    stage, permanent, meaning = ROW_FAILURE_CODES[code]
    failure = RowFailure.of(code, "why")
    assert (failure.stage, failure.permanent, failure.message) == (stage, permanent, "why")
    assert stage in ("tokenize", "capture", "stage")
    assert meaning.endswith(".")


def test_an_unknown_row_failure_is_a_bug():
    with pytest.raises(KeyError):
        RowFailure.of("no_such_code", "why")

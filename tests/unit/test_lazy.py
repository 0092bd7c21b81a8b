"""Attributes that are made once, however many threads want them at once."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from wllm_ray.lazy import lazy

pytestmark = pytest.mark.requirement("P-4")


def test_it_is_made_once_and_kept():
    made = []

    class Thing:
        @lazy
        def value(self):
            """What it is."""
            made.append(self)
            return object()

    thing, other = Thing(), Thing()
    assert thing.value is thing.value
    assert other.value is not thing.value
    assert made == [thing, other]
    assert Thing.value.__doc__ == "What it is."


def test_threads_that_come_at_once_are_given_the_same_one():
    meeting = threading.Barrier(8)

    class Thing:
        @lazy
        def value(self):
            meeting.wait(10)
            return object()

    thing = Thing()
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: thing.value, range(8)))
    assert found == {thing.value}


def test_an_error_is_not_kept():
    class Thing:
        answers = iter([ZeroDivisionError, 3])

        @lazy
        def value(self):
            answer = next(self.answers)
            if answer is ZeroDivisionError:
                raise answer
            return answer

    thing = Thing()
    with pytest.raises(ZeroDivisionError):
        _ = thing.value
    assert thing.value == 3

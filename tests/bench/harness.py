"""What a benchmark is, and how times are taken that can be compared."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

Seconds = dict[str, list[float]]
# Where `python -m tests.bench…` is found.
CHECKOUT = Path(__file__).parents[2]


class NotRunError(Exception):
    """A benchmark cannot run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How the benchmarks are run.

    Attributes:
        work: A folder for their files, on the file system that is measured.
        model: The model that engines load.
        quick: Small sizes, to see that everything runs; too small to judge anything.
    """

    work: Path
    model: Path
    quick: bool = False

    def pick(self, full: Any, quick: Any) -> Any:
        return quick if self.quick else full


@dataclass(frozen=True, slots=True)
class Measure:
    """One number, and the bound that it must keep where it has one."""

    name: str
    value: float
    unit: str
    least: float | None = None
    most: float | None = None

    @property
    def met(self) -> bool | None:
        """None without a bound."""
        if self.least is None and self.most is None:
            return None
        above = self.least is None or self.value >= self.least
        return above and (self.most is None or self.value <= self.most)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a benchmark found.

    Attributes:
        measures: The numbers.
        parameters: What they are of: sizes, counts, the model.
        seconds: What was timed → the time of each round.
    """

    measures: list[Measure]
    parameters: dict[str, Any] = field(default_factory=dict)
    seconds: Seconds = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A registered benchmark: ``run`` raises :class:`NotRunError` where it cannot run."""

    name: str
    requirement: str
    what: str
    run: Callable[[Settings], Outcome]


def interleaved(rounds: int, calls: dict[str, Callable[[], float]]) -> Seconds:
    """Run everything in turn, round after round, so that a busy moment meets all alike.

    Args:
        rounds: How often, after one round that does not count.
        calls: What is timed → runs it and returns the seconds that it took.
    """
    seconds: Seconds = {name: [] for name in calls}
    for number in range(rounds + 1):
        names = list(calls) if number % 2 else list(reversed(calls))
        for name in names:
            took = calls[name]()
            if number:
                seconds[name].append(took)
    return seconds


def speed_ratio(seconds: Seconds, name: str, *yardsticks: str) -> float:
    """How fast ``name`` is where the slowest yardstick is 1: the median over the rounds."""
    rounds = zip(seconds[name], *(seconds[one] for one in yardsticks), strict=True)
    return median(max(others) / own for own, *others in rounds)


@dataclass(slots=True)
class Stopwatch:
    seconds: float = 0.0


@contextmanager
def stopwatch() -> Iterator[Stopwatch]:
    watch = Stopwatch()
    began = time.perf_counter()
    yield watch
    watch.seconds = time.perf_counter() - began


def timed(call: Callable[[], object]) -> Callable[[], float]:
    """The call as one that returns its seconds."""

    def run() -> float:
        with stopwatch() as watch:
            call()
        return watch.seconds

    return run

"""How many rows go to an engine in one call: as many as a memory budget allows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Self, TypeAlias

import numpy as np

from wllm_ray.capture.protocol import Engine
from wllm_ray.errors import InvalidInputError
from wllm_ray.memory import available_memory, release_unused, resident_memory
from wllm_ray.offered import offered_sites
from wllm_ray.records import CaptureTask, EngineDescription, RowRecord, TokenRow
from wllm_ray.requests import Selection

__all__ = ["AutoBatch", "Batching", "MemoryProfile", "RowsPerCall", "batching_of"]

FLOAT32_BYTES = 4
MIB = 1024 * 1024
# What is taken of the memory that nobody uses: the caller's arrays need some, too.
BUDGET_SHARE = 0.25
# Where the system does not say how much there is.
FALLBACK_BUDGET = 512 * MIB
# More would make nothing faster, and a call that is given up loses all of it.
MAX_TOKENS = 65_536
MAX_ROWS = 4096
# Of an engine that was not measured: float32 vectors as wide as the stream that a token needs
# while it passes through a block (queries, keys, values, a feed-forward several times as wide).
VECTORS_PER_TOKEN = 32
# Peaks shorter than the time between two looks are missed.
LOOK_EVERY_S = 0.001
MEASURED_MARGIN = 1.25


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes that a call takes beside what the engine holds all the time.

    Attributes:
        call_bytes: Whatever its size.
        token_bytes: For each token in a forward pass.
        pass_tokens: The most tokens in one forward pass, where prompts are split; more of them run
            one pass after another. None where they are not: all may be in one.
        feature_copies: How often a call's feature rows lie in memory when it ends.
    """

    call_bytes: int
    token_bytes: float
    pass_tokens: int | None
    feature_copies: int = 2

    @classmethod
    def estimated(cls, description: EngineDescription) -> Self:
        """A generous guess from the model's width, for an engine that was not measured."""
        return cls(
            call_bytes=0,
            token_bytes=VECTORS_PER_TOKEN * FLOAT32_BYTES * description.hidden_size,
            pass_tokens=_pass_tokens(description),
        )

    def bytes_of(self, tokens: int, feature_bytes: int) -> int:
        """Bytes that a call of this many tokens takes, with features of this many bytes."""
        passing = tokens if self.pass_tokens is None else min(tokens, self.pass_tokens)
        features = self.feature_copies * feature_bytes
        return int(self.call_bytes + self.token_bytes * passing + features)


@dataclass(frozen=True, slots=True)
class AutoBatch:
    """Cuts rows into calls that stay within a memory budget.

    A row that is over the budget by itself still gets a call of its own: it may well fit, and
    nothing smaller can be tried.

    Attributes:
        profile: What a call takes.
        budget_bytes: What all calls that run at once may take together.
        max_rows: Rows of one call, whatever the budget.
        max_tokens: Tokens of one call, whatever the budget.
    """

    profile: MemoryProfile
    budget_bytes: int
    max_rows: int = MAX_ROWS
    max_tokens: int = MAX_TOKENS

    @classmethod
    def estimated(cls, description: EngineDescription, budget_bytes: int | None = None) -> Self:
        """From what an engine says of itself.

        Args:
            description: The engine.
            budget_bytes: Default: a quarter of the memory that is available now.
        """
        return cls(MemoryProfile.estimated(description), _budget(budget_bytes))

    @classmethod
    def measure(
        cls,
        engine: Engine,
        *,
        budget_bytes: int | None = None,
        row_tokens: int = 128,
        rows: tuple[int, int] = (2, 16),
    ) -> Self:
        """From two calls of different size, while nothing else runs in this process.

        The growth of this process's memory during each is taken, with a margin, as a straight
        line. What an engine reserved when it started does not grow and costs nothing more.

        Args:
            engine: An engine in this process.
            budget_bytes: Default: a quarter of the memory that is available now.
            row_tokens: Tokens of each row.
            rows: Rows of the smaller and the larger call.

        Raises:
            InvalidInputError: The second call is not larger than the first.
        """
        if not 0 < rows[0] < rows[1]:
            raise InvalidInputError(
                f"`rows` are two growing numbers of rows, found {rows}", code="invalid_argument"
            )
        description = engine.description
        length = min(row_tokens, description.max_model_len)
        task = _probe_task(description, length, 1)
        engine.capture(task)  # what is loaded and compiled once must not count
        small, large = (_probe_task(description, length, count) for count in rows)
        growth = _growth([lambda: engine.capture(small), lambda: engine.capture(large)])
        return cls(
            _line(growth, (rows[0] * length, rows[1] * length), description),
            _budget(budget_bytes),
        )

    def plan(
        self, rows: Sequence[RowRecord], selection: Selection, calls: int = 1
    ) -> Iterator[Sequence[RowRecord]]:
        """Cut rows into consecutive runs, each for one call.

        Args:
            rows: Rows with token ids.
            selection: What is captured of each.
            calls: How many calls run at once and share the budget.
        """
        row_bytes = FLOAT32_BYTES * sum(selection.site_widths)
        budget = self.budget_bytes // calls
        start = tokens = features = 0
        for stop, row in enumerate(rows):
            own_tokens, own_features = _tokens(row), row_bytes * selection.feature_rows(row)
            tokens, features = tokens + own_tokens, features + own_features
            full = (
                stop - start == self.max_rows
                or tokens > self.max_tokens
                or self.profile.bytes_of(tokens, features) > budget
            )
            if full and stop > start:
                yield rows[start:stop]
                start, tokens, features = stop, own_tokens, own_features
        if start < len(rows):
            yield rows[start:]


@dataclass(frozen=True, slots=True)
class RowsPerCall:
    """The same number of rows in every call, whatever they need."""

    count: int

    def plan(
        self, rows: Sequence[RowRecord], _selection: Selection, _calls: int = 1
    ) -> Iterator[Sequence[RowRecord]]:
        """Cut rows into consecutive runs of ``count``; the last may be shorter."""
        for start in range(0, len(rows), self.count):
            yield rows[start : start + self.count]


Batching: TypeAlias = AutoBatch | RowsPerCall


def batching_of(
    sequences: int | Literal["auto"] | AutoBatch, description: EngineDescription
) -> Batching:
    """How rows are cut into calls.

    Args:
        sequences: Rows per call, ``auto`` for what the available memory allows, or a plan of the
            caller's own.
        description: The engine.

    Raises:
        InvalidInputError: None of these, or no rows.
    """
    if isinstance(sequences, AutoBatch):
        return sequences
    if sequences == "auto":
        return AutoBatch.estimated(description)
    if isinstance(sequences, bool) or not isinstance(sequences, int) or sequences < 1:
        raise InvalidInputError(
            f"sequences per call are a number from 1, 'auto' or an AutoBatch, found "
            f"{sequences!a:.80}",
            code="invalid_argument",
        )
    return RowsPerCall(sequences)


def _pass_tokens(description: EngineDescription) -> int | None:
    return description.fingerprint.prefill_split_tokens or None


def _tokens(row: RowRecord) -> int:
    return 0 if row.token_ids is None else len(row.token_ids)


def _budget(asked: int | None) -> int:
    if asked is None:
        available = available_memory()
        return FALLBACK_BUDGET if available is None else int(BUDGET_SHARE * available)
    if asked < 1:
        raise InvalidInputError(
            f"a memory budget is a number of bytes from 1, found {asked}", code="invalid_argument"
        )
    return asked


def _probe_task(description: EngineDescription, tokens: int, rows: int) -> CaptureTask:
    """Rows of unlike ids, read at one site: the features weigh next to nothing."""
    ids = np.random.default_rng(0).integers(0, description.vocab_size, (rows, tokens), np.int32)
    return CaptureTask(
        sites=offered_sites(description)[-1:],
        position="last_prompt",
        rows=tuple(TokenRow(index, one) for index, one in enumerate(ids)),
    )


def _line(
    growth: Sequence[int], tokens: tuple[int, int], description: EngineDescription
) -> MemoryProfile:
    """The straight line through two measurements; noise never makes it fall or start below 0."""
    pass_tokens = _pass_tokens(description)
    short, long = (min(count, pass_tokens or count) for count in tokens)
    rise = max(0, growth[1] - growth[0])
    # Both are over one pass: what they took is what a full pass takes.
    slope = rise / (long - short) if long > short else 0.0
    start = max(0.0, max(growth) - slope * long)
    return MemoryProfile(
        call_bytes=int(MEASURED_MARGIN * start),
        token_bytes=MEASURED_MARGIN * slope,
        pass_tokens=pass_tokens,
    )


def _growth(calls: Iterable[Callable[[], object]]) -> list[int]:
    """How far memory rises above what it was before all calls, during each of them.

    What the first leaves behind counts in the second, which uses it again; what earlier work left
    behind would hide both.
    """
    release_unused()
    before = resident_memory()
    return [max(0, _peak_during(call) - before) for call in calls]


def _peak_during(call: Callable[[], object]) -> int:
    """The highest resident memory while a call runs, in bytes."""
    peak = resident_memory()
    done = threading.Event()

    def look() -> None:
        nonlocal peak
        while not done.wait(LOOK_EVERY_S):
            peak = max(peak, resident_memory())

    watcher = threading.Thread(target=look, name="wllm-memory", daemon=True)
    watcher.start()
    try:
        call()
    finally:
        done.set()
        watcher.join()
    return max(peak, resident_memory())

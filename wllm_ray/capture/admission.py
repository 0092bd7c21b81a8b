"""Which requests enter the next forward pass, chosen so that a row's bits do not depend on others.

Matrix kernels take other paths for other numbers of rows, and a prompt that is split elsewhere is
rounded elsewhere. With one thread per engine, three rules make a row's bits a function of the row:
only whole prompts enter a pass that has room for them; a prompt longer than the split size is
split at its fixed multiples and nowhere else; no pass has fewer than :data:`MIN_PASS_TOKENS`
tokens (a filler request makes up for them).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

__all__ = ["MIN_PASS_TOKENS", "Admission", "Limits", "PassPlan"]

# float32 kernels were seen to take other paths below 8 rows on one CPU and below 16 on another.
MIN_PASS_TOKENS = 16
# How far behind the head of the queue a prompt may stand that fills what is left of a pass. The
# head itself enters the next pass first, so nobody is overtaken twice.
_LOOK_AHEAD = 64

T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one pass can hold.

    Attributes:
        pass_tokens: Tokens that prompts may share one pass with.
        split_tokens: The multiple at which longer prompts are split. It is more than
            ``pass_tokens`` where the engine cannot split: a longer prompt then runs whole, alone.
        max_requests: Requests in a pass, fillers left out.
        cache_blocks: Blocks of the key-value cache.
        blocks_for: Blocks that a prompt of so many tokens takes.
    """

    pass_tokens: int
    split_tokens: int
    max_requests: int
    cache_blocks: int
    blocks_for: Callable[[int], int]


@dataclass(slots=True)
class PassPlan(Generic[T]):
    """The next pass.

    Attributes:
        admitted: Requests to hand to the engine now, in order.
        tokens: Tokens of each request in the pass, those admitted before included.
        filler_tokens: How many tokens a filler must add for the pass to be long enough.
    """

    admitted: list[T] = field(default_factory=list)
    tokens: dict[T, int] = field(default_factory=dict)
    filler_tokens: int = 0


@dataclass(slots=True)
class _Running:
    tokens: int
    blocks: int
    done: int = 0


@dataclass(slots=True)
class _Room:
    tokens: int
    requests: int
    blocks: int

    def take(self, tokens: int, blocks: int) -> bool:
        if tokens > self.tokens or self.requests < 1 or blocks > self.blocks:
            return False
        self.tokens -= tokens
        self.requests -= 1
        self.blocks -= blocks
        return True


class Admission(Generic[T]):
    """First come, first served, whole prompts only; at most one long prompt at a time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._waiting: deque[tuple[T, int]] = deque()
        self._running: dict[T, _Running] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def add(self, request: T, tokens: int) -> None:
        """Queue a prompt of so many tokens."""
        self._waiting.append((request, tokens))

    def drop(self, requests: set[T]) -> None:
        """Forget these requests, wherever they stand."""
        self._waiting = deque(item for item in self._waiting if item[0] not in requests)
        for request in requests:
            self._running.pop(request, None)

    def next_pass(self) -> PassPlan[T]:
        """Plan the pass; the requests in it count as running until they are dropped."""
        plan: PassPlan[T] = PassPlan()
        limits = self._limits
        room = _Room(limits.pass_tokens, limits.max_requests, limits.cache_blocks)
        for request, running in self._running.items():
            plan.tokens[request] = min(running.tokens - running.done, limits.split_tokens)
            room.take(min(plan.tokens[request], room.tokens), running.blocks)
        self._admit(plan, room)
        if total := sum(plan.tokens.values()):
            plan.filler_tokens = max(0, MIN_PASS_TOKENS - total)
        return plan

    def start_of(self, request: T) -> int:
        """The position that a running request goes on from."""
        return self._running[request].done

    def ran(self, request: T, end: int) -> None:
        """The engine has run a request up to a position; after pre-emption that can be less."""
        self._running[request].done = end

    def end(self, request: T) -> None:
        """The engine is done with a request."""
        self._running.pop(request, None)

    def _admit(self, plan: PassPlan[T], room: _Room) -> None:
        limits = self._limits
        for request, tokens in list(islice(self._waiting, _LOOK_AHEAD)) if room.tokens else ():
            if tokens > limits.pass_tokens and plan.tokens:
                continue
            blocks = limits.blocks_for(tokens)
            if room.take(min(tokens, limits.pass_tokens), blocks):
                plan.admitted.append(request)
                plan.tokens[request] = min(tokens, limits.split_tokens)
                self._running[request] = _Running(tokens, blocks)
        self._take_from_queue(set(plan.admitted))

    def _take_from_queue(self, admitted: set[T]) -> None:
        passed: list[tuple[T, int]] = []
        while admitted:
            item = self._waiting.popleft()
            if item[0] in admitted:
                admitted.remove(item[0])
            else:
                passed.append(item)
        self._waiting.extendleft(reversed(passed))

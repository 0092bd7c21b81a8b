"""Which outputs inside a block were added to the stream: arithmetic on one observed pass.

A branch is an output as wide as the stream, perhaps multiplied by a constant that the block
multiplied something by, perhaps with a bias that came back beside it. The fewest branches that give
the stream after a block when they are added to the stream before are the block's branches: bit for
bit, but for the order of addition. Nothing else explains thousands of numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product

import torch

from wllm_ray.capture.probe import BlockCall, Event
from wllm_ray.capture.reading import Path

__all__ = [
    "EXACT_SHARE",
    "Block",
    "Branch",
    "add_up",
    "exactness",
    "explain",
    "explains",
    "find_branches",
    "off_by_rounding",
    "same",
]

# Of all numbers, how many must come out to the bit; the rest may differ by the order of addition.
EXACT_SHARE = 0.98
_MAX_BRANCHES = 3
# More choices than these are not looked at: with so many, some would fit by chance.
_MOST_CHOICES = 400_000
_MOST_CANDIDATES = 200
# How much further off the second best must be where the best is not exact.
_CLEARLY = 4.0
# How many numbers are looked at before all of them are.
_GLANCED = 256
_AT_ONCE = 8192


@dataclass(frozen=True, slots=True)
class Branch:
    """What may be added to the stream: one output, and what the model did to it.

    Attributes:
        event: The call that returned it.
        path: Where in the output it lies.
        value: [T, D], the bias included.
        factor: What it is multiplied by, or None.
        bias: Where in the output a [D] vector lies that is added, or None.
    """

    event: Event
    path: Path
    value: torch.Tensor
    factor: float | None = None
    bias: Path | None = None

    @property
    def added(self) -> torch.Tensor:
        """[T, D]: what is added to the stream."""
        return self.value if self.factor is None else self.value * self.factor


@dataclass(slots=True)
class Block:
    """One block's evidence.

    Attributes:
        layer: Its number.
        name: Dotted, for messages.
        call: What was seen of it.
        before, after: [T, D], the stream that it was given and that it left.
        events: The calls inside it of modules that ran once in the pass.
        made_as: The block's class.
    """

    layer: int
    name: str
    call: BlockCall
    before: torch.Tensor
    after: torch.Tensor
    events: list[Event] = field(default_factory=list)
    made_as: str = ""


def find_branches(block: Block) -> list[Branch]:
    """Outputs as wide as the stream, each value once, by the outermost module that returned it."""
    found: dict[bytes, Branch] = {}
    stream = {_bytes(block.before), _bytes(block.after)}
    for event in sorted(block.events, key=lambda one: (one.name.count("."), one.ended)):
        vectors = [p for p, value in event.outputs.items() if value.shape == block.after.shape[1:]]
        for path, value in event.outputs.items():
            key = _bytes(value)
            if value.shape != block.after.shape or key in stream or key in found:
                continue
            if not value.any():
                continue
            found[key] = Branch(event, path, value)
            for bias in vectors:
                added = value + event.outputs[bias]
                found.setdefault(_bytes(added), Branch(event, path, added, bias=bias))
    return sorted(found.values(), key=lambda branch: branch.event.ended)


def explain(block: Block, branches: Sequence[Branch]) -> list[Branch] | None:
    """The fewest branches that lead from the stream before to the stream after.

    None where there are none, and where it cannot be told: every branch must be needed, and no
    other choice may do as well. A stream so large that it swallows its branches in rounding is
    explained by anything.
    """
    factors: list[float | None] = [None, *sorted(block.call.factors)]
    scaled = [
        Branch(one.event, one.path, one.value, factor, one.bias)
        for one in branches
        for factor in factors
    ]
    look = _Glance(block, scaled)
    for count in range(1, _MAX_BRANCHES + 1):
        groups = look.candidates(len(branches), len(factors), count)
        if groups is None or len(groups) > _MOST_CANDIDATES:
            return None
        choices = [[scaled[place] for place in group] for group in groups]
        exact = [group for group in choices if exactness(block, group) >= EXACT_SHARE]
        if exact:
            return _certain(block, min(exact, key=_plainness), exact)
        if nearest := _nearest(block, choices):
            return _certain(block, nearest, [nearest])
    return None


def explains(block: Block, branches: Sequence[Branch]) -> bool:
    """Whether these branches give the stream after, to the bit or but for rounding."""
    if exactness(block, branches) >= EXACT_SHARE:
        return True
    terms = [block.before, *(branch.added for branch in branches)]
    return any(off_by_rounding(total, block.after, terms) for total in _totals(block, branches))


def _certain(
    block: Block, chosen: list[Branch], exact: Sequence[list[Branch]]
) -> list[Branch] | None:
    """The choice, where each branch is needed and whatever else does as well adds the same."""
    if any(explains(block, [other for other in chosen if other is not one]) for one in chosen):
        return None
    values = {tuple(sorted(_bytes(branch.added) for branch in group)) for group in exact}
    return chosen if len(values) <= 1 else None


def _plainness(group: Sequence[Branch]) -> tuple[int, int]:
    """Fewest constants, then the outermost modules."""
    return (
        sum(branch.factor is not None for branch in group),
        sum(branch.event.name.count(".") for branch in group),
    )


def _nearest(block: Block, groups: Sequence[list[Branch]]) -> list[Branch] | None:
    """The only one that is off by rounding alone: some models have an order of their own."""
    found = []
    for group in groups:
        totals = list(_totals(block, group))
        if any(off_by_rounding(total, block.after, _terms(block, group)) for total in totals):
            off = min(float((total.double() - block.after.double()).norm()) for total in totals)
            found.append((off, group))
    found.sort(key=lambda one: one[0])
    if not found or (len(found) > 1 and found[1][0] < _CLEARLY * found[0][0]):
        return None
    return found[0][1]


def _terms(block: Block, branches: Sequence[Branch]) -> list[torch.Tensor]:
    return [block.before, *(branch.added for branch in branches)]


def off_by_rounding(
    total: torch.Tensor, wanted: torch.Tensor, terms: Sequence[torch.Tensor]
) -> bool:
    """Whether no number is further off than the rounding of a few additions of these terms."""
    size = torch.stack([term.double().abs() for term in terms]).sum(dim=0)
    allowed = (len(terms) + 1) * torch.finfo(wanted.dtype).eps * size
    return bool(((total.double() - wanted.double()).abs() <= allowed).all())


class _Glance:
    """A look at a few numbers, which spares adding up everything for every choice of branches."""

    def __init__(self, block: Block, scaled: Sequence[Branch]) -> None:
        flat = block.after.reshape(-1)
        picked = torch.linspace(0, flat.numel() - 1, _GLANCED).long()
        self._before = block.before.reshape(-1)[picked].double()
        self._gap = flat[picked].double() - self._before
        self._eps = torch.finfo(flat.dtype).eps
        added = [branch.added.reshape(-1)[picked].double() for branch in scaled]
        self._added = torch.stack(added) if added else torch.empty(0, _GLANCED).double()

    def candidates(self, branches: int, factors: int, count: int) -> list[tuple[int, ...]] | None:
        """Choices of ``count`` branches, each with one factor, that may explain the block.

        None where there are too many to try.
        """
        if math.comb(branches, count) * factors**count > _MOST_CHOICES:
            return None
        groups = [
            tuple(branch * factors + factor for branch, factor in zip(chosen, used, strict=True))
            for chosen in combinations(range(branches), count)
            for used in product(range(factors), repeat=count)
        ]
        if not groups:
            return []
        near = torch.cat([self._near(part) for part in torch.tensor(groups).split(_AT_ONCE)])
        return [groups[i] for i in torch.nonzero(near).flatten().tolist()]

    def _near(self, groups: torch.Tensor) -> torch.Tensor:
        chosen = self._added[groups]
        # Each addition rounds by half a unit of what has been added up by then.
        size = self._before.abs() + chosen.abs().sum(dim=1)
        off = (chosen.sum(dim=1) - self._gap).abs()
        return (off <= (groups.shape[1] + 1) * self._eps * size).all(dim=1)


def exactness(block: Block, branches: Sequence[Branch]) -> float:
    """The share of numbers that come out to the bit, in the best order of addition."""
    return max(float((sum_ == block.after).double().mean()) for sum_ in _totals(block, branches))


def _totals(block: Block, branches: Sequence[Branch]) -> Iterator[torch.Tensor]:
    """The stream after, in every order of addition that models use."""
    added = [branch.added for branch in branches]
    before = block.before
    yield add_up([before, *added])
    if len(added) <= 1:
        return
    yield add_up([before, *reversed(added)])
    yield before + add_up(added)
    # The first two together, then the rest: two mixers side by side.
    yield add_up([before + add_up(added[:2]), *added[2:]])
    # The last two together: a parallel pair after one, or what is multiplied only when it is added
    # up (Granite's experts and the feed-forward beside them).
    head = add_up([before, *added[:-2]])
    yield head + add_up(added[-2:])
    factors = {branch.factor for branch in branches[-2:]}
    if len(factors) == 1 and (factor := factors.pop()) is not None:
        yield head + add_up([branch.value for branch in branches[-2:]]) * factor


def add_up(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """One after the other, in their dtype."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal to the bit, shape and dtype included."""
    return one.shape == other.shape and one.dtype == other.dtype and bool(torch.equal(one, other))


def _bytes(value: torch.Tensor) -> bytes:
    return bytes(value.contiguous().view(torch.uint8).numpy().tobytes())

"""How the value of a hook site is read: at which places of the model, and how it is put together.

A place is the input or the output of a module. A reading takes one tensor at each of its places,
adds them up in order and multiplies by a constant, all in the model's own dtype: that is what the
model itself did with them, so the result has the model's own bits. The engine reads with this one
module when it settles a structure, when it captures and when it tests itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import torch
from torch import nn

__all__ = ["Part", "Path", "Place", "Reading", "Side", "follow", "take", "tensors_in", "walk"]

# Where a tensor lies inside nested tuples, lists and dicts.
Path: TypeAlias = tuple[int | str, ...]


class Side(StrEnum):
    """What is seen of a module: ``(args, kwargs)`` when it is called, or what it returns."""

    INPUT = "input"
    OUTPUT = "output"


@dataclass(frozen=True, slots=True)
class Place:
    """The input or the output of one module; ``name`` is dotted, for messages."""

    module: nn.Module
    name: str
    side: Side


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor at a place: [T, D], [1, T, D], [B, T, D], or a [D] vector that all rows share."""

    place: Place
    path: Path


@dataclass(frozen=True, slots=True)
class Reading:
    """How one site is read.

    Attributes:
        parts: What is added up, in this order.
        scale: What the sum is multiplied by, or None.
        width: Size of the site's vector.
        depth: The deepest block that must run; -1 for none, the number of blocks where the model's
            last norm must run too.
    """

    parts: tuple[Part, ...]
    width: int
    depth: int
    scale: float | None = None

    def combine(self, taken: Sequence[torch.Tensor]) -> torch.Tensor:
        """Put together what was taken at each part.

        Args:
            taken: For each part [K, D], or [D].

        Returns:
            [K, D] in the model's dtype. It shares memory with ``taken`` where there is one part
            and no scale.
        """
        total = taken[0]
        for other in taken[1:]:
            total = total + other
        return total if self.scale is None else total * self.scale

    def describe(self) -> str:
        """In words, for a report."""
        parts = " + ".join(
            f"{part.place.side} of {part.place.name}" + "".join(f"[{step}]" for step in part.path)
            for part in self.parts
        )
        return parts if self.scale is None else f"({parts}) * {self.scale:g}"


def walk(value: Any, path: Path = ()) -> Iterator[tuple[Path, torch.Tensor]]:
    """All tensors in nested tuples, lists and dicts, in order, with their paths."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from walk(item, (*path, key))
    elif isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield from walk(item, (*path, index))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    return (tensor for _, tensor in walk(value))


def follow(value: Any, path: Path) -> Any:
    """The item at a path."""
    for step in path:
        value = value[step]
    return value


def take(value: Any, path: Path, rows: torch.Tensor) -> torch.Tensor:
    """The wanted rows of one tensor, as memory of their own.

    Fused norms write into a module's output after it returned, so nothing that is kept may be a
    view of it.

    Args:
        value: What was seen at a place.
        path: Where in it the tensor lies.
        rows: [K] int64 flat rows, on the tensor's device.

    Returns:
        [K, D]; a [D] vector is copied whole.

    Raises:
        TypeError: There is no floating-point tensor at the path.
    """
    tensor = follow(value, path)
    if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
        raise TypeError(f"expected a floating-point tensor, found {type(tensor).__name__}")
    if tensor.ndim == 1:
        return tensor.clone()
    return tensor.reshape(-1, tensor.shape[-1]).index_select(0, rows)

"""Forward passes that stop at the deepest block that anybody in them needs.

A private exception leaves the model from a hook on that block and is caught around the model's
``forward``, which then returns a tensor that nobody reads. This works for every structure of
blocks, and leaves the bits of the blocks that did run as they are. Which blocks really ran is
counted, not assumed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["DepthBound"]


class _DepthReachedError(BaseException):
    """Leaves the forward pass; no ``except Exception`` inside a model can hold it."""


class DepthBound:
    """Stops passes of one model.

    Args:
        model: What the runner calls.
        blocks: The decoder blocks, in order.

    Attributes:
        ran: The blocks that ran in the last pass that was begun, in order.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        self._blocks = blocks
        self._deepest: int | None = None
        self._counters: list[RemovableHandle] = []
        self._stop: RemovableHandle | None = None
        self.ran: list[int] = []
        self._stopped = False
        self._wrap(model)

    def begin(self, deepest: int | None) -> None:
        """Say how deep the next pass must go; call after all other hooks are on the model.

        Args:
            deepest: The last block to run, -1 for none; None or the number of blocks for all.
        """
        self._let_go()
        self.ran, self._stopped = [], False
        self._count()
        bounded = deepest is not None and deepest < len(self._blocks)
        self._deepest = deepest if bounded else None
        if self._deepest == -1:
            self._stop = self._blocks[0].register_forward_pre_hook(self._leave)
        elif self._deepest is not None:
            self._stop = self._blocks[self._deepest].register_forward_hook(self._leave)

    def end(self) -> str | None:
        """Take the stop off again; say what is wrong with the blocks that ran, or None."""
        self._let_go()
        deepest, self._deepest = self._deepest, None
        last = len(self._blocks) - 1 if deepest is None else deepest
        if self.ran == list(range(last + 1)) and self._stopped == (deepest is not None):
            return None
        return f"blocks 0 to {last} should have run once each, those that ran: {self.ran}"

    def remove(self) -> None:
        """Take all hooks off the model; passes then run as the model has them."""
        self._let_go()
        for handle in self._counters:
            handle.remove()
        self._counters = []

    def _count(self) -> None:
        if not self._counters:
            self._counters = [
                block.register_forward_hook(lambda *_, layer=layer: self.ran.append(layer))
                for layer, block in enumerate(self._blocks)
            ]

    def _let_go(self) -> None:
        if self._stop is not None:
            self._stop.remove()
            self._stop = None

    def _leave(self, *_: Any) -> None:
        self._stopped = True
        raise _DepthReachedError

    def _wrap(self, model: nn.Module) -> None:
        whole = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            try:
                return whole(*args, **kwargs)
            except _DepthReachedError:
                return _nothing(self._tokens(args, kwargs))

        model.forward = forward

    @staticmethod
    def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
        """The first tensor of the call: token ids, or what stands for them; [T, …]."""
        values = [*kwargs.values(), *args]
        return next(value for value in values if isinstance(value, torch.Tensor))


def _nothing(tokens: torch.Tensor) -> torch.Tensor:
    """[T, 1] zeros: as many rows as the model would return, of a width that nobody can use."""
    return torch.zeros((tokens.shape[0], 1), device=tokens.device)

"""Watches one forward pass: what the blocks were given and returned, and what ran after them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

__all__ = ["BlockCall", "ModuleCall", "Probe", "ProbeLog", "tensors_in"]


@dataclass(slots=True)
class BlockCall:
    """One call of a block. The tensors are copies: fused norms write into their arguments."""

    index: int
    inputs: list[torch.Tensor]
    output: Any = None


@dataclass(slots=True)
class ModuleCall:
    """One call of a module after the blocks; ``output`` is its first floating-point tensor."""

    name: str
    output: torch.Tensor | None = None


@dataclass(slots=True)
class ProbeLog:
    """What was seen in one pass.

    Attributes:
        num_tokens: Flat tokens in the pass.
        hidden_size: Width of the stream, from the model's configuration.
        block_calls: List name → its blocks' calls, in order of return.
        after_blocks: List name → modules entered after the last block returned, in that order.
    """

    num_tokens: int
    hidden_size: int
    block_calls: dict[str, list[BlockCall]] = field(default_factory=dict)
    after_blocks: dict[str, list[ModuleCall]] = field(default_factory=dict)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return tuple(_copy(item) for item in value) if isinstance(value, (tuple, list)) else value


class Probe:
    """Hooks on every module outside the candidate blocks and on the blocks themselves.

    Args:
        model: The model as it is loaded.
        blocks: Candidate lists of blocks, by dotted name.
        hidden_size: Width of the stream.

    Use as a context manager around exactly one pass.
    """

    def __init__(
        self, model: nn.Module, blocks: dict[str, tuple[nn.Module, ...]], hidden_size: int
    ) -> None:
        self._model = model
        self._blocks = blocks
        self._handles: list[RemovableHandle] = []
        self.log = ProbeLog(num_tokens=0, hidden_size=hidden_size)

    def __enter__(self) -> Self:
        for name, blocks in self._blocks.items():
            self.log.block_calls[name], self.log.after_blocks[name] = [], []
            for index, block in enumerate(blocks):
                self._watch_block(name, index, block)
        inside = {
            id(part) for blocks in self._blocks.values() for b in blocks for part in b.modules()
        }
        for name, module in self._model.named_modules():
            if id(module) not in inside:
                self._watch_other(name, module)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _watch_block(self, name: str, index: int, block: nn.Module) -> None:
        calls = self.log.block_calls[name]
        entered: list[BlockCall] = []

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = [tensor.clone() for tensor in tensors_in([args, kwargs])]
            entered.append(BlockCall(index, inputs))

        def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            call = entered.pop()
            call.output = _copy(output)
            calls.append(call)

        self._handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(block.register_forward_hook(after))

    def _watch_other(self, name: str, module: nn.Module) -> None:
        entered: list[ModuleCall] = []

        def before(_: nn.Module, __: tuple[Any, ...]) -> None:
            call = ModuleCall(name)
            entered.append(call)
            for blocks_name, blocks in self._blocks.items():
                if len(self.log.block_calls[blocks_name]) == len(blocks):
                    self.log.after_blocks[blocks_name].append(call)

        def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            floats = (tensor for tensor in tensors_in(output) if tensor.is_floating_point())
            first = next(floats, None)
            entered.pop().output = None if first is None else first.clone()

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after))

"""Watches one forward pass: what the blocks and the modules inside them were given and returned.

Everything is copied to host memory when it is seen, because fused norms write into their arguments
and into the outputs of other modules.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from wllm_ray.capture.reading import Path, walk

__all__ = ["BlockCall", "Event", "ModuleCall", "Probe", "ProbeLog"]

_MULTIPLICATIONS = frozenset({"mul", "mul_", "multiply", "__mul__", "__rmul__", "__imul__"})

Tensors = dict[Path, torch.Tensor]


@dataclass(slots=True, eq=False)
class Event:
    """One call of a module inside a block.

    Attributes:
        name: Dotted, from the block.
        module: The module.
        began, ended: Ticks of one clock, which order the events of a pass.
        inputs: Path in ``(args, kwargs)`` → [T, width] floating-point tensor, on the host.
        outputs: Path → [T, width], or a [width] vector.
    """

    name: str
    module: nn.Module
    began: int
    ended: int = 0
    inputs: Tensors = field(default_factory=dict)
    outputs: Tensors = field(default_factory=dict)


@dataclass(slots=True)
class BlockCall:
    """One call of a block.

    Attributes:
        index: Its number in the list.
        inputs: As of an :class:`Event`.
        output: What it returned, copied, still on the model's device and in its own shape.
        outputs: The same as of an :class:`Event`.
        events: The calls of modules inside it, in the order in which they ended.
        factors: Constants that tensors were multiplied by inside it.
    """

    index: int
    inputs: Tensors
    output: Any = None
    outputs: Tensors = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    factors: set[float] = field(default_factory=set)


@dataclass(slots=True)
class ModuleCall:
    """One call of a module after the blocks.

    ``output`` is its first floating-point tensor, which lies at ``path``; ``unchanged`` says
    whether that is its first input.
    """

    name: str
    first_input: torch.Tensor | None
    path: Path = ()
    output: torch.Tensor | None = None
    unchanged: bool = False


@dataclass(slots=True)
class ProbeLog:
    """What was seen in one pass.

    Attributes:
        num_tokens: Flat tokens in the pass.
        hidden_size: Width of the stream, from the model's configuration.
        block_calls: List name → its blocks' calls, in order of return.
        after_blocks: List name → modules entered after the last block returned, in that order.
        times: How often each module ran.
        returned: What the model itself returned: what its head is given.
    """

    num_tokens: int
    hidden_size: int
    block_calls: dict[str, list[BlockCall]] = field(default_factory=dict)
    after_blocks: dict[str, list[ModuleCall]] = field(default_factory=dict)
    times: Counter[nn.Module] = field(default_factory=Counter)
    returned: torch.Tensor | None = None


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    return tuple(_copy(item) for item in value) if isinstance(value, (tuple, list)) else value


class _Factors(TorchFunctionMode):  # type: ignore[misc]  # torch has no types here
    """Notes the constants that tensors are multiplied by while a block runs."""

    def __init__(self, running: Sequence[BlockCall]) -> None:
        super().__init__()
        self._running = running

    def __torch_function__(
        self, func: Any, _: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._running and getattr(func, "__name__", "") in _MULTIPLICATIONS:
            self._running[-1].factors.update(_constants(args))
        return func(*args, **kwargs or {})


def _constants(args: tuple[Any, ...]) -> list[float]:
    plain = [float(arg) for arg in args if isinstance(arg, (int, float))]
    single = [
        float(arg)
        for arg in args
        if isinstance(arg, torch.Tensor) and arg.numel() == 1 and arg.is_floating_point()
    ]
    return [value for value in plain + single if value not in (0.0, 1.0) and math.isfinite(value)]


class Probe:
    """Hooks on every module of the model.

    Args:
        model: The model as it is loaded.
        blocks: Candidate lists of blocks, by dotted name.
        hidden_size: Width of the stream.
        num_tokens: Flat tokens of the pass that will be run.

    Use as a context manager around exactly one pass, on the thread that runs it.
    """

    def __init__(
        self,
        model: nn.Module,
        blocks: dict[str, tuple[nn.Module, ...]],
        hidden_size: int,
        num_tokens: int,
    ) -> None:
        self._model = model
        self._blocks = blocks
        self._handles: list[RemovableHandle] = []
        self._running: list[BlockCall] = []
        self._clock = 0
        self._factors = _Factors(self._running)
        self.log = ProbeLog(num_tokens=num_tokens, hidden_size=hidden_size)

    def __enter__(self) -> Self:
        inside: set[nn.Module] = set()
        for name, blocks in self._blocks.items():
            self.log.block_calls[name], self.log.after_blocks[name] = [], []
            for index, block in enumerate(blocks):
                self._watch_block(name, index, block)
                for part, module in block.named_modules():
                    if module is not block and module not in inside:
                        self._watch_part(part, module)
                    inside.add(module)
        for name, module in self._model.named_modules():
            if module not in inside:
                self._watch_other(name, module)
        self._factors.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._factors.__exit__(*error)
        for handle in self._handles:
            handle.remove()

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _tensors(self, value: Any, *, vectors: bool) -> Tensors:
        """Copies of what could be activations: a row for each token, or one vector for all."""
        found: Tensors = {}
        for path, tensor in walk(value):
            if not tensor.is_floating_point() or not tensor.numel():
                continue
            rows = math.prod(tensor.shape[:-1])
            if tensor.ndim > 1 and rows == self.log.num_tokens:
                flat = tensor.detach().reshape(rows, -1)
                found[path] = flat.to("cpu", copy=True)
            elif vectors and tensor.ndim == 1:
                found[path] = tensor.detach().to("cpu", copy=True)
        return found

    def _watch_block(self, name: str, index: int, block: nn.Module) -> None:
        calls = self.log.block_calls[name]

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs = self._tensors((args, kwargs), vectors=False)
            self._running.append(BlockCall(index, inputs))

        def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            call = self._running.pop()
            call.output = _copy(output)
            call.outputs = self._tensors(output, vectors=False)
            calls.append(call)

        self._handles.append(block.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(block.register_forward_hook(after))

    def _watch_part(self, name: str, module: nn.Module) -> None:
        entered: list[Event] = []

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            event = Event(name, module, self._tick())
            event.inputs = self._tensors((args, kwargs), vectors=False)
            entered.append(event)

        def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            event = entered.pop()
            event.outputs = self._tensors(output, vectors=True)
            event.ended = self._tick()
            self.log.times[module] += 1
            if self._running:
                self._running[-1].events.append(event)

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        self._handles.append(module.register_forward_hook(after))

    def _watch_other(self, name: str, module: nn.Module) -> None:
        entered: list[ModuleCall] = []

        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            call = ModuleCall(name, _first_float(args)[1])
            entered.append(call)
            for blocks_name, blocks in self._blocks.items():
                if len(self.log.block_calls[blocks_name]) == len(blocks):
                    self.log.after_blocks[blocks_name].append(call)

        def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            call = entered.pop()
            call.path, call.output = _first_float(output)
            call.unchanged = _equal(call.first_input, call.output)
            call.first_input = None
            self.log.times[module] += 1
            if module is self._model:
                self.log.returned = call.output

        self._handles.append(module.register_forward_pre_hook(before))
        self._handles.append(module.register_forward_hook(after))


def _first_float(value: Any) -> tuple[Path, torch.Tensor | None]:
    for path, tensor in walk(value):
        if tensor.is_floating_point():
            return path, tensor.clone()
    return (), None


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.equal(one, other))

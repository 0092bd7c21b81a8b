"""Forward hooks that read wanted rows off the decoder blocks.

One gather and one device-to-host copy per block and pass, of wanted rows only. What a hook keeps
is its own memory when it returns, because fused norms write into the block's output afterwards. A
hook never lets an exception reach the engine, which would then spin for ever; what goes wrong is
recorded and fails the rows concerned.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.hooks import RemovableHandle

from wllm_ray.capture.coverage import CaptureRow, ChunkCapture
from wllm_ray.capture.topology import Residual, read_stream

__all__ = ["BlockHooks", "Gather"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gather:
    """Flat rows of one pass that go to one chunk.

    Attributes:
        chunk: Where they go.
        rows: [K] int64 flat rows.
        slots: [K] int64 slots of the chunk.
        owners: The captured rows that they belong to.
    """

    chunk: ChunkCapture
    rows: NDArray[np.int64]
    slots: NDArray[np.int64]
    owners: tuple[CaptureRow, ...]


class _Pending(Protocol):
    """A copy on its way to host memory."""

    def read(self) -> NDArray[np.float32]: ...


@dataclass(slots=True)
class _LayerWork:
    gathers: list[Gather]
    index: torch.Tensor
    fired: int = 0
    pending: _Pending | None = None
    error: Exception | None = None


@dataclass(slots=True)
class _HostRows:
    """The CPU's copy: the gather itself already owns its memory."""

    rows: torch.Tensor

    def read(self) -> NDArray[np.float32]:
        result: NDArray[np.float32] = self.rows.float().numpy()
        return result


@dataclass(slots=True)
class _CudaRows:
    """A copy into pinned memory, on a stream of its own."""

    pinned: torch.Tensor
    done: torch.cuda.Event

    def read(self) -> NDArray[np.float32]:
        self.done.synchronize()
        result: NDArray[np.float32] = self.pinned.float().numpy()
        # float() of a float32 tensor is the staging buffer itself, which the next pass overwrites.
        return result.copy() if self.pinned.dtype == torch.float32 else result


class _Stager:
    """Brings gathered rows to the host without stopping the model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[int, torch.Tensor] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def index(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """[K] int64 on the model's device."""
        host = torch.from_numpy(rows)
        return host if self._stream is None else host.to(self._device)

    def stage(self, layer: int, rows: torch.Tensor) -> _Pending:
        """Start the copy of [K, D] rows; the result may be read after the pass."""
        if self._stream is None:
            return _HostRows(rows)
        pinned = self._pinned(layer, rows)
        # The copy waits for the gather, and the allocator must not reuse the gathered memory
        # before the copy has read it.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            pinned.copy_(rows, non_blocking=True)
            rows.record_stream(self._stream)
            done = torch.cuda.Event()
            done.record(self._stream)
        return _CudaRows(pinned, done)

    def _pinned(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(layer)
        if buffer is None or buffer.shape[0] < rows.shape[0]:
            buffer = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=True)
            self._buffers[layer] = buffer
        return buffer[: rows.shape[0]]


@dataclass(slots=True)
class BlockHooks:
    """A forward hook on every decoder block; idle outside :meth:`begin` … :meth:`end`.

    Args:
        blocks: The decoder blocks, in order.
        residual: How the stream is read off their output.
        device: Where the model runs.
    """

    blocks: Sequence[nn.Module]
    residual: Residual
    device: torch.device
    _handles: list[RemovableHandle] = field(default_factory=list, init=False)
    _work: dict[int, _LayerWork] = field(default_factory=dict, init=False)
    _stager: _Stager = field(init=False)

    def __post_init__(self) -> None:
        self._stager = _Stager(self.device)
        for layer, block in enumerate(self.blocks):
            self._handles.append(block.register_forward_hook(self._hook_for(layer)))

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def begin(self, gathers: Sequence[Gather]) -> None:
        """Say what to gather in the pass that comes next."""
        indices: dict[tuple[int, ...], torch.Tensor] = {}
        for layer in sorted({layer for gather in gathers for layer in gather.chunk.layers}):
            wanted = [gather for gather in gathers if layer in gather.chunk.column]
            key = tuple(id(gather) for gather in wanted)
            if key not in indices:
                indices[key] = self._stager.index(np.concatenate([g.rows for g in wanted]))
            self._work[layer] = _LayerWork(wanted, indices[key])

    def end(self) -> None:
        """Store what the pass gathered; rows whose hook did not do its work once are failed."""
        work, self._work = self._work, {}
        for layer, layer_work in work.items():
            try:
                _settle_layer(layer, layer_work)
            except Exception as error:  # noqa: BLE001 (a hook's fault must not reach the engine)
                _log.error("the hook of block %d failed", layer, exc_info=error)
                _fail(
                    layer_work.gathers,
                    f"the hook of block {layer} raised {type(error).__name__}; the log has more",
                )

    def _hook_for(self, layer: int) -> Any:
        def hook(_: nn.Module, __: tuple[Any, ...], output: Any) -> None:
            work = self._work.get(layer)
            if work is None:
                return
            work.fired += 1
            try:
                self._gather(layer, work, output)
            except Exception as error:  # noqa: BLE001 (as in end)
                work.error = error

        return hook

    def _gather(self, layer: int, work: _LayerWork, output: Any) -> None:
        rows = read_stream(output, self.residual, work.index)
        work.pending = self._stager.stage(layer, rows)


def _settle_layer(layer: int, work: _LayerWork) -> None:
    if work.error is not None:
        raise work.error
    if work.fired != 1 or work.pending is None:
        _fail(work.gathers, f"the hook of block {layer} fired {work.fired} times in one pass")
        return
    values = work.pending.read()
    first = 0
    for gather in work.gathers:
        last = first + len(gather.rows)
        gather.chunk.write(layer, gather.slots, values[first:last])
        first = last


def _fail(gathers: Iterable[Gather], message: str) -> None:
    for gather in gathers:
        for row in gather.owners:
            row.fail("hook_failed", message)

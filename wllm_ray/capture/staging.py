"""Brings gathered rows to the host without stopping the model.

On a GPU: pinned memory, a copy stream of its own, an event before anything is read.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["Pending", "Stager", "stager_for"]


class Pending(Protocol):
    """A copy on its way to host memory."""

    def read(self) -> NDArray[np.float32]:
        """[K, D] float32; waits until the copy is whole. Valid until the next pass begins."""


class Stager(Protocol):
    """Starts copies to host memory."""

    def index(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """[K] int64 on the model's device."""

    def stage(self, key: Hashable, rows: torch.Tensor) -> Pending:
        """Start the copy of [K, D] rows, which nobody else may write; one a pass for each key."""


def stager_for(device: torch.device) -> Stager:
    """The stager of a device."""
    if device.type == "cuda":
        return CudaStager(device, torch.cuda)
    return HostStager()


@dataclass(slots=True)
class _HostRows:
    rows: torch.Tensor

    def read(self) -> NDArray[np.float32]:
        result: NDArray[np.float32] = self.rows.float().numpy()
        return result


class HostStager:
    """On a CPU there is nothing to copy: the gather itself already owns its memory."""

    def index(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """[K] int64."""
        return torch.from_numpy(rows)

    def stage(self, key: Hashable, rows: torch.Tensor) -> Pending:
        """Nothing to wait for."""
        del key
        return _HostRows(rows)


@dataclass(slots=True)
class _CudaRows:
    pinned: torch.Tensor
    done: Any

    def read(self) -> NDArray[np.float32]:
        self.done.synchronize()
        result: NDArray[np.float32] = self.pinned.float().numpy()
        # float() of a float32 tensor is the staging buffer itself, which the next pass overwrites.
        return result.copy() if self.pinned.dtype == torch.float32 else result


class CudaStager:
    """Copies into pinned memory on a stream of its own, while the model goes on.

    Args:
        device: The model's device.
        cuda: ``torch.cuda``; tests pass one that records the order of what is asked of it.
        pin: Whether the buffers are pinned; memory cannot be where there is no GPU.
    """

    def __init__(self, device: torch.device, cuda: Any, *, pin: bool = True) -> None:
        self._device = device
        self._cuda = cuda
        self._pin = pin
        self._stream = cuda.Stream(device)
        self._buffers: dict[Hashable, torch.Tensor] = {}

    def index(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """[K] int64 on the model's device."""
        return torch.from_numpy(rows).to(self._device)

    def stage(self, key: Hashable, rows: torch.Tensor) -> Pending:
        """Start the copy after the gather, on the copy stream."""
        pinned = self._pinned(key, rows)
        # The copy waits for the gather, and the allocator must not reuse the gathered memory
        # before the copy has read it.
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        with self._cuda.stream(self._stream):
            pinned.copy_(rows, non_blocking=True)
            rows.record_stream(self._stream)
            done = self._cuda.Event()
            done.record(self._stream)
        return _CudaRows(pinned, done)

    def _pinned(self, key: Hashable, rows: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(key)
        count, *shape = rows.shape
        fits = buffer is not None and buffer.shape[0] >= count and [*buffer.shape[1:]] == shape
        if buffer is None or not fits or buffer.dtype != rows.dtype:
            buffer = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=self._pin)
            self._buffers[key] = buffer
        return buffer[:count]

"""The buffers of a chunk, and the proof that every wanted value arrived exactly once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wllm_ray.records import RowFailure

__all__ = ["CaptureRow", "ChunkCapture", "RowsWanted"]


@dataclass(frozen=True, slots=True)
class RowsWanted:
    """One row's part of a chunk before it runs.

    Attributes:
        index: The row's index in its dataset.
        token_ids: [N] the prompt.
        positions: [P] absolute positions wanted, strictly ascending.
    """

    index: int
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int64]


class CaptureRow:
    """One row in flight: its engine request, its slots in the chunk, and what went wrong.

    Attributes:
        request_id: The engine's id, unique in this process; never the user's.
        first_slot: Where the row's positions begin in the chunk's buffers.
        logprobs: Token id → log-probability of the next token, where the chunk asked for them.
    """

    __slots__ = ("chunk", "failure", "first_slot", "logprobs", "request_id", "wanted")

    def __init__(
        self, chunk: ChunkCapture, wanted: RowsWanted, request_id: str, first_slot: int
    ) -> None:
        self.chunk = chunk
        self.wanted = wanted
        self.request_id = request_id
        self.first_slot = first_slot
        self.failure: RowFailure | None = None
        self.logprobs: dict[int, float] = {}

    @property
    def slots(self) -> slice:
        """The row's slots in the chunk's buffers."""
        return slice(self.first_slot, self.first_slot + len(self.wanted.positions))

    def fail(self, code: str, message: str) -> None:
        """Record why the row has no activation; the first reason stands."""
        if self.failure is None:
            self.failure = RowFailure.of(code, message)


class ChunkCapture:
    """Collects the activations of one chunk while its rows run.

    Args:
        layers: Decoder blocks wanted, in the order of the result's site axis.
        rows: What is wanted of each row.
        request_ids: One engine id for each row.
        hidden_size: Width of the stream.
        num_logprobs: How many of the most likely next tokens to record for each row, or None.

    Attributes:
        features: [slots, layers, hidden] float32, C order.
        counts: [slots, layers] how often each value was written; 1 is right.
        recaptured: Wanted positions that came again after pre-emption; the first stands.
    """

    def __init__(
        self,
        layers: tuple[int, ...],
        rows: list[RowsWanted],
        request_ids: list[str],
        hidden_size: int,
        num_logprobs: int | None = None,
    ) -> None:
        self.layers = layers
        self.column = {layer: column for column, layer in enumerate(layers)}
        self.num_logprobs = num_logprobs
        self.recaptured = 0
        ends = np.cumsum([len(row.positions) for row in rows], dtype=np.int64)
        slots = int(ends[-1]) if len(rows) else 0
        self.features = np.zeros((slots, len(layers), hidden_size), dtype=np.float32)
        self.counts = np.zeros((slots, len(layers)), dtype=np.uint8)
        self.rows = [
            CaptureRow(self, row, request_id, int(end) - len(row.positions))
            for row, request_id, end in zip(rows, request_ids, ends, strict=True)
        ]

    def write(self, layer: int, slots: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Store the values of one layer: ``slots`` [K], ``values`` [K, hidden]."""
        column = self.column[layer]
        self.features[slots, column] = values
        self.counts[slots, column] += 1

    def prove(self) -> None:
        """Fail every row that is not whole: each wanted value once, finite, not all zero."""
        finite = np.asarray(np.isfinite(self.features).all(axis=2))
        zero = np.asarray(~self.features.any(axis=2))
        for row in self.rows:
            if row.failure is None:
                self._prove_row(row, finite[row.slots], zero[row.slots])

    def _prove_row(
        self, row: CaptureRow, finite: NDArray[np.bool_], zero: NDArray[np.bool_]
    ) -> None:
        counts = self.counts[row.slots]
        if (counts == 0).any():
            row.fail("position_missing", f"{self._where(row, counts == 0)} was not captured")
        elif (counts > 1).any():
            row.fail("position_repeated", f"{self._where(row, counts > 1)} was captured twice")
        elif not finite.all():
            place = self._where(row, ~finite)
            first = np.argwhere(~np.isfinite(self.features[row.slots]))[0, 2]
            row.fail("non_finite", f"{place} is not finite, first at hidden index {first}")
        elif zero.any():
            row.fail("all_zero", f"{self._where(row, zero)} is zero throughout")

    def _where(self, row: CaptureRow, bad: NDArray[np.bool_]) -> str:
        slot, column = np.argwhere(bad)[0]
        return f"position {row.wanted.positions[slot]} of block {self.layers[column]}"

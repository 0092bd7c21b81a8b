"""The buffers of a chunk, and the proof that every wanted value arrived exactly once."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from wllm_ray.positions import mean_of
from wllm_ray.records import RowFailure
from wllm_ray.sites import HookSite

__all__ = ["CaptureRow", "ChunkCapture", "RowsWanted", "SitesWanted"]


@dataclass(frozen=True, slots=True)
class RowsWanted:
    """One row's part of a chunk before it runs.

    Attributes:
        index: The row's index in its dataset.
        token_ids: [N] the prompt.
        positions: [P] absolute positions wanted, strictly ascending.
        order: [R] which of them each feature row is, in the order asked for; None where that is
            their own.
    """

    index: int
    token_ids: NDArray[np.int32]
    positions: NDArray[np.int64]
    order: NDArray[np.int64] | None = None


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


@dataclass(frozen=True, slots=True)
class SitesWanted:
    """What is read in every row of a chunk.

    Attributes:
        sites: In the order of the result.
        widths: Size of each site's vector.
        depth: The deepest block that must run; the number of blocks where the last norm must too.
        mean: Whether a row's positions are averaged into one feature row.
        last_only: Whether nothing but the last token of each row is read.
    """

    sites: tuple[HookSite, ...]
    widths: tuple[int, ...]
    depth: int
    mean: bool = False
    last_only: bool = False


class ChunkCapture:
    """Collects the activations of one chunk while its rows run.

    Args:
        wanted: What is read in every row.
        rows: Which positions of which rows.
        request_ids: One engine id for each row.
        num_logprobs: How many of the most likely next tokens to record for each row, or None.

    Attributes:
        features: [slots, sum(widths)] float32, C order, the sites side by side.
        counts: [slots, sites] how often each vector was written; 1 is right.
        columns: Site → its columns.
        recaptured: Wanted positions that came again after pre-emption; the first stands.
    """

    def __init__(
        self,
        wanted: SitesWanted,
        rows: list[RowsWanted],
        request_ids: list[str],
        num_logprobs: int | None = None,
    ) -> None:
        self.wanted = wanted
        self.sites = wanted.sites
        self.num_logprobs = num_logprobs
        self.recaptured = 0
        ends = np.cumsum([len(row.positions) for row in rows], dtype=np.int64)
        slots = int(ends[-1]) if len(rows) else 0
        edges = np.cumsum([0, *wanted.widths]).tolist()
        self.columns = {
            site: slice(start, stop)
            for site, (start, stop) in zip(wanted.sites, pairwise(edges), strict=True)
        }
        self._number = {site: number for number, site in enumerate(wanted.sites)}
        self.features = np.zeros((slots, edges[-1]), dtype=np.float32)
        self.counts = np.zeros((slots, len(wanted.sites)), dtype=np.uint8)
        self.rows = [
            CaptureRow(self, row, request_id, int(end) - len(row.positions))
            for row, request_id, end in zip(rows, request_ids, ends, strict=True)
        ]

    def write(self, site: HookSite, slots: NDArray[np.int64], values: NDArray[np.float32]) -> None:
        """Store the values of one site: ``slots`` [K], ``values`` [K, width]."""
        self.features[slots, self.columns[site]] = values
        self.counts[slots, self._number[site]] += 1

    def values(self, row: CaptureRow, site: HookSite) -> NDArray[np.float32]:
        """[P, width] of one row and site, in ascending positions."""
        return self.features[row.slots, self.columns[site]]

    def prove(self) -> None:
        """Fail every row that is not whole: each wanted vector once, finite, not all zero."""
        finite = np.empty(self.counts.shape, dtype=np.bool_)
        zero = np.empty(self.counts.shape, dtype=np.bool_)
        for number, columns in enumerate(self.columns.values()):
            values = self.features[:, columns]
            finite[:, number] = np.isfinite(values).all(axis=1)
            zero[:, number] = ~values.any(axis=1)
        for row in self.rows:
            if row.failure is None:
                self._prove_row(row, finite[row.slots], zero[row.slots])

    def good_rows(self) -> NDArray[np.float32]:
        """[feature rows, sum(widths)] of the rows that did not fail, as they were asked for."""
        plain = not self.wanted.mean and all(row.wanted.order is None for row in self.rows)
        if plain and all(row.failure is None for row in self.rows):
            return self.features
        kept = [self._as_asked(row) for row in self.rows if row.failure is None]
        return np.concatenate(kept) if kept else self.features[:0]

    def feature_rows(self, row: CaptureRow) -> int:
        """How many feature rows a row that did not fail has."""
        if self.wanted.mean:
            return 1
        return len(row.wanted.positions if row.wanted.order is None else row.wanted.order)

    def _as_asked(self, row: CaptureRow) -> NDArray[np.float32]:
        values = self.features[row.slots]
        if self.wanted.mean:
            return mean_of(values)
        return values if row.wanted.order is None else values[row.wanted.order]

    def _prove_row(
        self, row: CaptureRow, finite: NDArray[np.bool_], zero: NDArray[np.bool_]
    ) -> None:
        counts = self.counts[row.slots]
        if (counts == 0).any():
            row.fail("position_missing", f"{self._where(row, counts == 0)} was not captured")
        elif (counts > 1).any():
            row.fail("position_repeated", f"{self._where(row, counts > 1)} was captured twice")
        elif not finite.all():
            slot, number = np.argwhere(~finite)[0]
            values = self.values(row, self.sites[number])[slot]
            first = int(np.flatnonzero(~np.isfinite(values))[0])
            place = self._where(row, ~finite)
            row.fail("non_finite", f"{place} is not finite, first at hidden index {first}")
        elif zero.any():
            row.fail("all_zero", f"{self._where(row, zero)} is zero throughout")

    def _where(self, row: CaptureRow, bad: NDArray[np.bool_]) -> str:
        slot, number = np.argwhere(bad)[0]
        return f"position {row.wanted.positions[slot]} of {self.sites[number]}"

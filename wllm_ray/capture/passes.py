"""Ties reservations, router and hooks together: what happens before and after a forward pass."""

from __future__ import annotations

import numpy as np

from wllm_ray.capture.coverage import CaptureRow, ChunkCapture
from wllm_ray.capture.hooks import BlockHooks, Gather
from wllm_ray.capture.router import Pass, RoutedPass, Router

__all__ = ["PassCapture"]


class PassCapture:
    """Captures reserved rows in every pass. Belongs to the engine's thread alone.

    Attributes:
        ran: Request id → first position and end in the last pass, as the runner had them; None
            where the pass could not be read.
    """

    def __init__(self, hooks: BlockHooks) -> None:
        self.hooks = hooks
        self.router = Router()
        self.ran: dict[str, tuple[int, int]] | None = None
        self._rows: dict[str, CaptureRow] = {}

    def reserve(self, row: CaptureRow) -> None:
        """Capture this row in the passes to come."""
        self.router.reserve(row.request_id, row.wanted.token_ids, row.wanted.positions)
        self._rows[row.request_id] = row

    def release(self, request_id: str) -> None:
        """Capture nothing more of this request, and let its buffers go."""
        self.router.release(request_id)
        self._rows.pop(request_id, None)

    def begin(self, one_pass: Pass) -> None:
        """Call when the runner has laid out a pass and has not run it yet."""
        ends = one_pass.num_computed + one_pass.num_scheduled
        spans = zip(one_pass.num_computed.tolist(), ends.tolist(), strict=True)
        self.ran = dict(zip(one_pass.request_ids, spans, strict=True))
        routed = self.router.route(one_pass)
        for request_id, difference in routed.mismatched.items():
            self._rows[request_id].fail("token_mismatch", difference)
        for request_id, times in routed.recaptured.items():
            self._rows[request_id].chunk.recaptured += times
        self.hooks.begin(self._gathers(routed))

    def end(self) -> None:
        """Call when the pass has run."""
        self.hooks.end()

    def fail_all(self, message: str) -> None:
        """A pass could not be read: every row in flight is in doubt."""
        for row in self._rows.values():
            row.fail("hook_failed", message)

    def _gathers(self, routed: RoutedPass) -> list[Gather]:
        """One gather for each chunk with rows in the pass."""
        by_chunk: dict[ChunkCapture, list[tuple[CaptureRow, int]]] = {}
        for place, route in enumerate(routed.routes):
            row = self._rows[route.request_id]
            by_chunk.setdefault(row.chunk, []).append((row, place))
        return [
            Gather(
                chunk=chunk,
                rows=np.concatenate([routed.routes[place].rows for _, place in members]),
                slots=np.concatenate(
                    [row.first_slot + routed.routes[place].slots for row, place in members]
                ),
                owners=tuple(row for row, _ in members),
            )
            for chunk, members in by_chunk.items()
        ]

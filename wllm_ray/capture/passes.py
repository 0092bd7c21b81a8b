"""Ties reservations, router, hooks and depth together: what happens before and after a pass."""

from __future__ import annotations

import numpy as np

from wllm_ray.capture.coverage import CaptureRow, ChunkCapture
from wllm_ray.capture.depth import DepthBound
from wllm_ray.capture.hooks import Gather, SiteHooks
from wllm_ray.capture.router import Pass, RoutedPass, Router

__all__ = ["PassCapture"]


class PassCapture:
    """Captures reserved rows in every pass. Belongs to the engine's thread alone.

    Args:
        hooks: Reads the sites.
        bound: Stops passes.

    Attributes:
        depth_bounded: Whether passes in which nobody generates stop at the deepest block wanted.
        ran: Request id → first position and end in the last pass, as the runner had them; None
            where the pass could not be read.
        headless: Nobody wants a token of the pass that runs now, so head and sampler are left out.
    """

    def __init__(self, hooks: SiteHooks, bound: DepthBound) -> None:
        self.hooks = hooks
        self.bound = bound
        self.router = Router()
        self.depth_bounded = False
        self.headless = False
        self.ran: dict[str, tuple[int, int]] | None = None
        self._rows: dict[str, CaptureRow] = {}
        self._depths: dict[str, int] = {}
        self._present: list[CaptureRow] = []

    def expect(self, request_id: str, depth: int) -> None:
        """Say how deep a request needs its passes; a request not named here needs all of it."""
        self._depths[request_id] = depth

    def reserve(self, row: CaptureRow) -> None:
        """Capture this row in the passes to come."""
        self.router.reserve(row.request_id, row.wanted.token_ids, row.wanted.positions)
        self._rows[row.request_id] = row

    def release(self, request_id: str) -> None:
        """Capture nothing more of this request, and let its buffers go."""
        self.router.release(request_id)
        self._rows.pop(request_id, None)
        self._depths.pop(request_id, None)

    def begin(self, one_pass: Pass) -> None:
        """Call when the runner has laid out a pass and has not run it yet."""
        # What cannot be read from here on must not run as headless as the pass before.
        self.headless = False
        ids = one_pass.request_ids
        ends = one_pass.num_computed + one_pass.num_scheduled
        spans = zip(one_pass.num_computed.tolist(), ends.tolist(), strict=True)
        self.ran = dict(zip(ids, spans, strict=True))
        self._present = [self._rows[request_id] for request_id in ids if request_id in self._rows]
        routed = self.router.route(one_pass)
        for request_id, difference in routed.mismatched.items():
            self._rows[request_id].fail("token_mismatch", difference)
        for request_id, times in routed.recaptured.items():
            self._rows[request_id].chunk.recaptured += times
        self.hooks.begin(self._gathers(routed))
        self._bound_depth(ids)

    def end(self) -> None:
        """Call when the pass has run."""
        self.hooks.end()
        if self._present and (problem := self.bound.end()):
            for row in self._present:
                row.fail("hook_failed", problem)
        self._present = []

    def fail_all(self, message: str) -> None:
        """A pass could not be read: every row in flight is in doubt."""
        for row in self._rows.values():
            row.fail("hook_failed", message)

    def _bound_depth(self, request_ids: tuple[str, ...]) -> None:
        if not self._present:
            self.bound.remove()
            return
        captures_only = all(request_id in self._depths for request_id in request_ids)
        self.headless = self.depth_bounded and captures_only
        deepest = (
            max(self._depths[request_id] for request_id in request_ids) if self.headless else None
        )
        self.bound.begin(deepest)

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

"""Which rows of a flat forward pass belong to whom: pure NumPy, no model.

A forward pass runs the tokens of many requests in one flat batch. Each request contributes a span
of consecutive absolute positions: it starts at the tokens already computed for it, and it may be
a whole prompt, a prefill chunk, one decoded token, or a recomputation after pre-emption. The order
is the runner's own and changes from pass to pass. :class:`Router` knows which absolute positions
of which request are wanted and says, for each pass, which flat rows to gather and where each goes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

__all__ = ["Pass", "Route", "RoutedPass", "Router"]

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass as the runner laid it out.

    Attributes:
        request_ids: R ids, in the runner's order.
        query_start_loc: [R + 1] first flat row of each request, and the total.
        num_computed: [R] tokens of each request computed before this pass.
        num_scheduled: [R] tokens of each request in this pass.
        token_ids: [T] ids that are run, in flat order.

    Raises:
        ValueError: The parts contradict each other.
    """

    request_ids: tuple[str, ...]
    query_start_loc: Ints
    num_computed: Ints
    num_scheduled: Ints
    token_ids: NDArray[np.integer]

    def __post_init__(self) -> None:
        requests = len(self.request_ids)
        if len(set(self.request_ids)) != requests:
            raise ValueError(f"a request occurs twice in one pass: {self.request_ids}")
        if self.query_start_loc.shape != (requests + 1,):
            raise ValueError(
                f"expected {requests + 1} offsets for {requests} requests, "
                f"found shape {self.query_start_loc.shape}"
            )
        if self.query_start_loc[0] != 0 or not np.array_equal(
            np.diff(self.query_start_loc), self.num_scheduled
        ):
            raise ValueError(
                f"offsets {self.query_start_loc.tolist()} do not match the scheduled token "
                f"counts {self.num_scheduled.tolist()}"
            )
        if len(self.token_ids) != self.query_start_loc[-1]:
            raise ValueError(
                f"expected {self.query_start_loc[-1]} token ids, found {len(self.token_ids)}"
            )


@dataclass(frozen=True, slots=True)
class Route:
    """Flat rows of one request to gather in a pass.

    Attributes:
        request_id: Whose they are.
        rows: [K] flat rows.
        slots: [K] for each, which of the request's wanted positions it is.
    """

    request_id: str
    rows: Ints
    slots: Ints


@dataclass(frozen=True, slots=True)
class RoutedPass:
    """What to gather in one pass.

    Attributes:
        routes: One for each reserved request with a wanted position in the pass.
        mismatched: Request id → how the ids that are run differ from those submitted.
        recaptured: Request id → wanted positions that were captured before; the first stands.
    """

    routes: tuple[Route, ...]
    mismatched: dict[str, str]
    recaptured: dict[str, int]


@dataclass(slots=True)
class _Reservation:
    token_ids: NDArray[np.integer]
    positions: Ints
    taken: NDArray[np.bool_] = field(init=False)

    def __post_init__(self) -> None:
        self.taken = np.zeros(len(self.positions), dtype=np.bool_)


class Router:
    """Holds the reservations and routes passes. Requests without one are never captured."""

    def __init__(self) -> None:
        self._reserved: dict[str, _Reservation] = {}

    def __len__(self) -> int:
        return len(self._reserved)

    def reserve(self, request_id: str, token_ids: NDArray[np.integer], positions: Ints) -> None:
        """Ask for absolute positions of a request.

        Args:
            request_id: The engine's id; never reused.
            token_ids: [N] the prompt as submitted.
            positions: [P] wanted positions, strictly ascending.

        Raises:
            ValueError: The id is reserved already, or the positions do not ascend from 0.
        """
        if request_id in self._reserved:
            raise ValueError(f"request {request_id} is reserved already")
        if len(positions) == 0 or positions[0] < 0 or np.any(np.diff(positions) <= 0):
            raise ValueError(f"positions must ascend from 0, found {positions.tolist()}")
        self._reserved[request_id] = _Reservation(token_ids, positions)

    def release(self, request_id: str) -> None:
        """Forget a request; later passes that hold it capture nothing."""
        self._reserved.pop(request_id, None)

    def route(self, one_pass: Pass) -> RoutedPass:
        """Say what to gather in this pass, and mark it as taken."""
        routes: list[Route] = []
        mismatched: dict[str, str] = {}
        recaptured: dict[str, int] = {}
        for place, request_id in enumerate(one_pass.request_ids):
            reservation = self._reserved.get(request_id)
            if reservation is None:
                continue
            if difference := _difference(one_pass, place, reservation.token_ids):
                mismatched[request_id] = difference
                continue
            route, again = _route_one(one_pass, place, reservation)
            if len(route.rows):
                routes.append(route)
            if again:
                recaptured[request_id] = again
        return RoutedPass(tuple(routes), mismatched, recaptured)


def _difference(one_pass: Pass, place: int, prompt: NDArray[np.integer]) -> str | None:
    """Compare the ids of a span with the prompt; decoded tokens have nothing to compare with."""
    start = int(one_pass.num_computed[place])
    first, last = one_pass.query_start_loc[place : place + 2]
    expected = prompt[start : start + last - first]
    found = one_pass.token_ids[first : first + len(expected)]
    wrong = np.flatnonzero(expected != found)
    if len(wrong) == 0:
        return None
    at = int(wrong[0])
    return (
        f"position {start + at}: token id {expected[at]} was submitted, the engine ran {found[at]}"
    )


def _route_one(one_pass: Pass, place: int, reservation: _Reservation) -> tuple[Route, int]:
    start = int(one_pass.num_computed[place])
    first = int(one_pass.query_start_loc[place])
    end = start + int(one_pass.num_scheduled[place])
    low, high = np.searchsorted(reservation.positions, [start, end])
    fresh = low + np.flatnonzero(~reservation.taken[low:high])
    reservation.taken[fresh] = True
    rows = reservation.positions[fresh] - start + first
    return Route(one_pass.request_ids[place], rows, fresh), int(high - low - len(fresh))

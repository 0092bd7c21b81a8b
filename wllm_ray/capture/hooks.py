"""Forward hooks that read wanted rows at the places of hook sites.

One gather and one device-to-host copy per site and pass, of wanted rows only. What a hook keeps is
its own memory when it returns, because fused norms write into a module's output afterwards. A hook
never lets an exception reach the engine, which would then spin for ever; what goes wrong is
recorded and fails the rows concerned. Where nothing is wanted, no hook is on the model.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.hooks import RemovableHandle

from wllm_ray.capture.coverage import CaptureRow, ChunkCapture
from wllm_ray.capture.reading import Place, Reading, Side, take
from wllm_ray.capture.staging import Pending, Stager
from wllm_ray.sites import HookSite

__all__ = ["Gather", "SiteHooks"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
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


@dataclass(slots=True)
class _SiteWork:
    """What is to be done for one site in one pass."""

    reading: Reading
    gathers: list[Gather]
    index: torch.Tensor
    taken: dict[int, torch.Tensor] = field(default_factory=dict)
    repeated: bool = False
    pending: Pending | None = None
    error: Exception | None = None


class SiteHooks:
    """Reads sites in the passes that :meth:`begin` announces.

    Args:
        readings: Every site that can be read, and how.
        stager: Brings rows to the host.
    """

    def __init__(self, readings: Mapping[HookSite, Reading], stager: Stager) -> None:
        self.readings = readings
        self._stager = stager
        self._handles: dict[Place, RemovableHandle] = {}
        self._work: dict[HookSite, _SiteWork] = {}
        # Place → what to take there: the site and which of its parts.
        self._at: dict[Place, list[tuple[HookSite, int]]] = {}

    def remove(self) -> None:
        """Take all hooks off the model."""
        self._hook_only(())

    def begin(self, gathers: Sequence[Gather]) -> None:
        """Say what to gather in the pass that comes next."""
        indices: dict[tuple[int, ...], torch.Tensor] = {}
        for site in dict.fromkeys(site for gather in gathers for site in gather.chunk.sites):
            wanted = [gather for gather in gathers if site in gather.chunk.columns]
            key = tuple(id(gather) for gather in wanted)
            if key not in indices:
                indices[key] = self._stager.index(np.concatenate([g.rows for g in wanted]))
            self._work[site] = _SiteWork(self.readings[site], wanted, indices[key])
        for site, work in self._work.items():
            for number, part in enumerate(work.reading.parts):
                self._at.setdefault(part.place, []).append((site, number))
        self._hook_only(self._at)

    def end(self) -> None:
        """Store what the pass gathered; rows whose hook did not do its work once are failed."""
        work, self._work, self._at = self._work, {}, {}
        for site, one in work.items():
            try:
                _settle(site, one)
            except Exception as error:  # noqa: BLE001 (a hook's fault must not reach the engine)
                _log.error("the hook of %s failed", site, exc_info=error)
                _fail(
                    one.gathers,
                    f"the hook of {site} raised {type(error).__name__}; the log has more",
                )

    def _hook_only(self, places: Iterable[Place]) -> None:
        """Hooks stay on from pass to pass while the same places are read."""
        wanted = set(places)
        for place in [place for place in self._handles if place not in wanted]:
            self._handles.pop(place).remove()
        for place in wanted - self._handles.keys():
            self._handles[place] = self._hook(place)

    def _hook(self, place: Place) -> RemovableHandle:
        if place.side is Side.OUTPUT:
            return place.module.register_forward_hook(
                lambda _module, _args, output: self._take(place, output)
            )
        return place.module.register_forward_pre_hook(
            lambda _module, args, kwargs: self._take(place, (args, kwargs)), with_kwargs=True
        )

    def _take(self, place: Place, value: Any) -> None:
        for site, number in self._at.get(place, ()):
            work = self._work[site]
            try:
                self._take_part(site, work, number, value)
            except Exception as error:  # noqa: BLE001 (as in end)
                work.error = error

    def _take_part(self, site: HookSite, work: _SiteWork, number: int, value: Any) -> None:
        if number in work.taken:
            work.repeated = True
            return
        parts = work.reading.parts
        work.taken[number] = take(value, parts[number].path, work.index)
        if len(work.taken) == len(parts):
            rows = work.reading.combine([work.taken[i] for i in range(len(parts))])
            work.pending = self._stager.stage(site, rows)


def _settle(site: HookSite, work: _SiteWork) -> None:
    if work.error is not None:
        raise work.error
    if work.pending is None or work.repeated:
        often = "more than once" if work.repeated else "never, or not everywhere"
        _fail(work.gathers, f"the hook of {site} fired {often} in one pass")
        return
    values = work.pending.read()
    first = 0
    for gather in work.gathers:
        last = first + len(gather.rows)
        gather.chunk.write(site, gather.slots, values[first:last])
        first = last


def _fail(gathers: Iterable[Gather], message: str) -> None:
    for gather in gathers:
        for row in gather.owners:
            row.fail("hook_failed", message)

"""A chunk whose values stay where the model is, as tensors in its own dtype."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from wllm_ray.capture.coverage import CaptureRow, ChunkCapture, RowsWanted, SitesWanted
from wllm_ray.capture.staging import Pending
from wllm_ray.sites import HookSite

__all__ = ["DeviceChunk", "DeviceStager"]


@dataclass(frozen=True, slots=True)
class _DeviceRows:
    rows: torch.Tensor

    def read(self) -> Any:
        return self.rows


class DeviceStager:
    """Stages nothing: the gathered rows themselves go to a :class:`DeviceChunk`.

    Args:
        device: The model's device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def index(self, rows: NDArray[np.int64]) -> torch.Tensor:
        """[K] int64 on the model's device."""
        return torch.from_numpy(rows).to(self._device)

    def stage(self, key: Hashable, rows: torch.Tensor) -> Pending:
        """Hand over [K, D] rows as they are."""
        del key
        return _DeviceRows(rows)


class DeviceChunk(ChunkCapture):
    """Collects the activations of one chunk on the device; what is proven of them is the same.

    Args:
        wanted: What is read in every row.
        rows: Which positions of which rows.
        request_ids: One id for each row.
        device: Where the values stay.
        dtype: The model's, for a chunk without rows.
    """

    def __init__(
        self,
        wanted: SitesWanted,
        rows: list[RowsWanted],
        request_ids: list[str],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        # The buffers on the host have no columns; how often each vector came is counted there.
        super().__init__(replace(wanted, widths=(0,) * len(wanted.sites)), rows, request_ids)
        self._widths = dict(zip(wanted.sites, wanted.widths, strict=True))
        self._device, self._dtype = device, dtype
        self._tensors: dict[HookSite, torch.Tensor] = {}

    def write(self, site: HookSite, slots: NDArray[np.int64], values: Any) -> None:
        """Store the values of one site: ``slots`` [K], ``values`` [K, width] on the device."""
        if site not in self._tensors:
            self._tensors[site] = values.new_zeros((len(self.counts), self._widths[site]))
        self._tensors[site][torch.from_numpy(slots).to(self._device)] = values
        super().write(site, slots, np.empty((len(slots), 0), dtype=np.float32))

    def values(self, row: CaptureRow, site: HookSite) -> NDArray[np.float32]:
        """[P, width] of one row and site, copied to the host."""
        found: NDArray[np.float32] = self._tensors[site][row.slots].float().cpu().numpy()
        return found

    def prove(self) -> None:
        """Fail every row that is not whole; only two bits of each vector are copied to the host."""
        came = [self._tensors[site] for site in self.sites if site in self._tensors]
        finite, zero = np.ones_like(self.counts, np.bool_), np.zeros_like(self.counts, np.bool_)
        if len(came) == len(self.sites):
            finite = torch.stack([t.isfinite().all(dim=1) for t in came], dim=1).cpu().numpy()
            zero = torch.stack([~t.any(dim=1) for t in came], dim=1).cpu().numpy()
        for row in self.rows:
            if row.failure is None:
                self._prove_row(row, finite[row.slots], zero[row.slots])

    def tensors(self) -> dict[HookSite, torch.Tensor]:
        """[feature rows, width] of every site, as asked for; all rows must be good.

        In the model's dtype; float32 where positions are averaged.
        """
        return {site: self._as_asked_for(site) for site in self.sites}

    def _as_asked_for(self, site: HookSite) -> torch.Tensor:
        if not self.rows:
            dtype = torch.float32 if self.wanted.mean else self._dtype
            return torch.empty((0, self._widths[site]), dtype=dtype, device=self._device)
        values = self._tensors[site]
        if self.wanted.mean:
            return torch.stack([values[row.slots].float().mean(dim=0) for row in self.rows])
        if all(row.wanted.order is None for row in self.rows):
            return values
        kept = [
            row.first_slot
            + (
                np.arange(len(row.wanted.positions))
                if row.wanted.order is None
                else row.wanted.order
            )
            for row in self.rows
        ]
        return values.index_select(0, torch.from_numpy(np.concatenate(kept)).to(self._device))

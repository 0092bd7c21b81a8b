"""Activations that stay where the model is, as tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from wllm_ray.capture.transformers_capture import TransformersCapture
from wllm_ray.engines.activations import AlignedRows
from wllm_ray.engines.calls import Calls
from wllm_ray.records import RowRecord
from wllm_ray.requests import capture_task
from wllm_ray.sites import HookSite

__all__ = ["DeviceActivations", "capture_on_device"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class DeviceActivations(AlignedRows):
    """Activations on the model's device, in its dtype (float32 for ``mean_prompt``).

    Attributes:
        tensors: For each site [N, width], owned by the caller and without a gradient.
    """

    tensors: tuple[torch.Tensor, ...]

    @property
    def features(self) -> torch.Tensor:
        """[N, D] for one site, else a new [N, L, D]; N counts feature rows.

        Raises:
            NotOfferedError: The sites differ in width (``widths_not_representable``).
        """
        self.expect_one_width()
        return self.tensors[0] if len(self.sites) == 1 else torch.stack(self.tensors, dim=1)

    def site(self, name: HookSite | str) -> torch.Tensor:
        """One site's [N, width], by any accepted spelling of its name.

        Raises:
            InvalidInputError: Not a site, or not one of these (``invalid_site``).
        """
        return self.tensors[self.number_of(name)]


def capture_on_device(
    engine: TransformersCapture, calls: Calls, rows: Sequence[RowRecord]
) -> DeviceActivations:
    """Capture rows call by call; nothing is copied to the host.

    Args:
        engine: The same as that of ``calls``.
        calls: How rows are cut.
        rows: All rows; those that could not be run carry their failure.

    Raises:
        CaptureError: The engine failed, or a row that it ran has no activation.
    """
    selection = calls.selection
    # Without any row that can be run there is one empty call: its tensors have device and dtype.
    cut = list(calls.parts(rows)) or [()]
    parts = [engine.capture_device(capture_task(selection, part)) for part in cut]
    lengths = {row.index: selection.feature_rows(row) for row in rows if row.failure is None}
    return DeviceActivations.align(
        rows,
        lengths,
        {},
        selection,
        description=engine.description,
        tensors=tuple(_joined([part[site] for part in parts]) for site in selection.sites),
    )


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """One tensor of all calls, which is not copied where there is only one."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tuple(tensors))

"""Probe accuracy by layer for the page, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.format.manifest import Manifest
from wllm_ray.dataset.reading.reader import ActivationDataset
from wllm_ray.digest import canonical_json
from wllm_ray.errors import InvalidInputError
from wllm_ray.positions import feature_rows_of
from wllm_ray.probe.fitting import ProbeReport, probe_by_layer
from wllm_ray.report.sample import Sample, draw

__all__ = ["Probing", "probe_sites"]

# Every site fits two probes, whose time grows with both.
_MOST_ROWS = 2000
_MOST_CLASSES = 20
_GROUP = "group"


@dataclass(frozen=True, slots=True, eq=False)
class Probing:
    """What the probes found.

    Attributes:
        found: None where there is a reason instead.
        reason: Why there are no probes; empty where there are.
        label: The metadata field that was predicted, or None.
        grouped: Whether a metadata field says which rows belong together; else each is its own
            group.
        sample: The rows that were used.
    """

    found: ProbeReport | None = None
    reason: str = ""
    label: str | None = None
    grouped: bool = False
    sample: Sample | None = None


class _Some:
    """Some rows of a dataset, as a :class:`~wllm_ray.probe.fitting.LabelledDataset`."""

    def __init__(self, dataset: ActivationDataset, sample: Sample) -> None:
        self._dataset = dataset
        numbers = sample.numbers.tolist()
        self.row_ids: Sequence[str] = [dataset.row_ids[row] for row in numbers]
        self.metadata: Sequence[Mapping[str, Any]] = [dataset.metadata[row] for row in numbers]

    @property
    def manifest(self) -> Manifest:
        """The whole dataset's."""
        return self._dataset.manifest

    def site(self, name: str) -> NDArray[np.float32]:
        """[n, D] float32."""
        return self._dataset.select(self.row_ids, site=name).features


def probe_sites(dataset: ActivationDataset, label: str | None, seed: int) -> Probing:
    """Fit and score a probe at every site.

    Args:
        dataset: Any dataset.
        label: The metadata field to predict, or None where there is none.
        seed: Of the sample, the split and the shuffled control.
    """
    if label is None:
        return Probing(reason="no metadata field is called label; name another one with --label")
    if feature_rows_of(dataset.manifest.position, 0) != 1:
        return Probing(
            reason=f"position {dataset.manifest.position} keeps several vectors of a row, and a "
            f"probe needs one",
            label=label,
        )
    classes = {canonical_json(row[label]) for row in dataset.metadata if label in row}
    if len(classes) > _MOST_CLASSES:
        return Probing(
            reason=f"the field has {len(classes):,} different values, more than "
            f"{_MOST_CLASSES}: not classes",
            label=label,
        )
    sample = draw(len(dataset), _MOST_ROWS, seed)
    rows = _Some(dataset, sample)
    grouped = any(_GROUP in row for row in rows.metadata)
    group = _GROUP if grouped else {row_id: row_id for row_id in rows.row_ids}
    try:
        found = probe_by_layer(rows, label, group, seed=seed)
    except InvalidInputError as error:
        return Probing(reason=error.message, label=label)
    return Probing(found=found, label=label, grouped=grouped, sample=sample)

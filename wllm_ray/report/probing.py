"""Probe accuracy by layer for the page, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.format.manifest import Manifest
from wllm_ray.dataset.reading.reader import ActivationDataset
from wllm_ray.digest import canonical_json
from wllm_ray.errors import InvalidInputError
from wllm_ray.lazy import lazy
from wllm_ray.positions import feature_rows_of
from wllm_ray.probe.fitting import ProbeReport, probe_by_layer
from wllm_ray.report.sample import Sample, draw

__all__ = ["Probing", "probe_sites"]

# Every site fits two probes, whose time grows with both.
_MOST_ROWS = 2000
_MOST_CLASSES = 20
# More than this is read site by site.
_READ_ONCE_BYTES = 256 << 20
_GROUP = "group"


@dataclass(frozen=True, slots=True, eq=False)
class Probing:
    """What the probes found.

    Attributes:
        found: None where there is a reason instead.
        reason: Why there are no probes; empty where there are.
        label: The metadata field that was predicted, or None.
        labelled: The good rows that have a label, or None.
        sample: Those of them that were used, or None.
        grouped: How many of these say which group they belong to; every other is its own.
    """

    found: ProbeReport | None = None
    reason: str = ""
    label: str | None = None
    labelled: Sample | None = None
    sample: Sample | None = None
    grouped: int = 0


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
        """[n, D] float32, for a name as the manifest has it."""
        if self._all_sites is not None:
            return self._all_sites[:, self.manifest.sites.index(name)]
        return self._dataset.select(self.row_ids, site=name).features

    @lazy
    def _all_sites(self) -> NDArray[np.float32] | None:
        """[n, L, D] float32 where sites share files, which are then fetched once; else None."""
        size = 4 * len(self.row_ids) * sum(self.manifest.site_widths)
        if self.manifest.shard_layout != "stacked" or size > _READ_ONCE_BYTES:
            return None
        shape = (len(self.row_ids), len(self.manifest.sites), -1)
        return self._dataset.select(self.row_ids).features.reshape(shape)


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
    labelled = _labelled(dataset, label)
    if not len(labelled):
        return Probing(
            reason=f"no good row has a string, an integer or a boolean under {label!a}", label=label
        )
    classes = {canonical_json(dataset.metadata[row][label]) for row in labelled.numbers.tolist()}
    if len(classes) > _MOST_CLASSES:
        return Probing(
            reason=f"the field has {len(classes):,} different values, more than "
            f"{_MOST_CLASSES}: not classes",
            label=label,
            labelled=labelled,
        )
    return _fit(dataset, label, labelled, seed)


def _labelled(dataset: ActivationDataset, label: str) -> Sample:
    """The rows whose label can be a class."""
    having = [isinstance(row.get(label), (str, int, bool)) for row in dataset.metadata]
    return Sample(np.flatnonzero(having).astype(np.int64), len(having))


def _fit(dataset: ActivationDataset, label: str, labelled: Sample, seed: int) -> Probing:
    drawn = draw(len(labelled), _MOST_ROWS, seed)
    sample = Sample(labelled.numbers[drawn.numbers], len(labelled))
    rows = _Some(dataset, sample)
    groups = [row.get(_GROUP) for row in rows.metadata]
    # With a word in front, no group is called as another row is.
    by_row = {
        row_id: f"row {row_id}" if group is None else f"group {group}"
        for row_id, group in zip(rows.row_ids, groups, strict=True)
    }
    asked = Probing(
        label=label, labelled=labelled, sample=sample, grouped=len(groups) - groups.count(None)
    )
    try:
        return replace(asked, found=probe_by_layer(rows, label, by_row, seed=seed))
    except InvalidInputError as error:
        return replace(asked, reason=error.message)

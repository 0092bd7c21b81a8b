"""Norms and the largest components by site, in one pass over the features with bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.reading.reader import ActivationDataset
from wllm_ray.report.sample import Sample

__all__ = ["Common", "Norms", "Peak", "SiteStats", "measure"]

# What is read at a time; some copies of it are made, in float64 too.
_BATCH_BYTES = 8 << 20
_COMMON = 3
# Sun et al. (2024) call an activation massive above both: in itself, and next to its own vector.
_MASSIVE_MAGNITUDE = 100.0
_MASSIVE_RATIO = 1000.0


@dataclass(frozen=True, slots=True)
class Norms:
    """L2 norms of a site's vectors; median and 99th percentile are those of a sample."""

    least: float
    median: float
    mean: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class Peak:
    """The value of largest magnitude at a site.

    Attributes:
        value: With its sign.
        component: Its index in the vector.
        feature_row: Of all feature rows, which one holds it; the first where several do.
        ratio: Its magnitude over the median magnitude in the same vector; infinite where more
            than half of that vector is zero.
    """

    value: float
    component: int
    feature_row: int
    ratio: float

    @property
    def is_massive(self) -> bool:
        """Whether it is over 100 and over 1,000 times the median magnitude."""
        return abs(self.value) > _MASSIVE_MAGNITUDE and self.ratio > _MASSIVE_RATIO


@dataclass(frozen=True, slots=True)
class Common:
    """A component, and the share of feature rows in which its magnitude is the largest."""

    component: int
    share: float


@dataclass(frozen=True, slots=True, eq=False)
class SiteStats:
    """What was found at one hook site.

    ``vectors`` are those of the picture's sample, [n, D] float32; empty where none were asked for.
    """

    site: str
    norms: Norms
    peak: Peak
    common: tuple[Common, ...]
    vectors: NDArray[np.float32]


class _Tally:
    """What is known of one site so far."""

    def __init__(self, site: str, width: int, norms: Sample, vectors: Sample | None) -> None:
        self._site = site
        self._norm_sample = norms
        self._vector_sample = vectors
        self._norms: list[NDArray[np.float64]] = []
        self._vectors = [np.empty((0, width), np.float32)]
        self._rows = 0
        self._sum, self._least, self._most = 0.0, np.inf, 0.0
        self._peak = Peak(0.0, 0, 0, 0.0)
        self._largest_in = np.zeros(width, np.int64)

    def add(self, features: NDArray[np.float32], start: int) -> None:
        """Count [B, D] feature rows, of which the first is number ``start``."""
        # In float64, since the square of a large float32 is not one.
        norms = np.sqrt(np.einsum("bd,bd->b", features, features, dtype=np.float64))
        self._sum += float(norms.sum())
        self._least = min(self._least, float(norms.min()))
        self._most = max(self._most, float(norms.max()))
        self._norms.append(norms[self._norm_sample.within(start, len(features))])
        if self._vector_sample is not None:
            self._vectors.append(features[self._vector_sample.within(start, len(features))])
        self._add_components(features, start)
        self._rows += len(features)

    def _add_components(self, features: NDArray[np.float32], start: int) -> None:
        magnitudes = np.abs(features)
        components = magnitudes.argmax(axis=1)
        self._largest_in += np.bincount(components, minlength=len(self._largest_in))
        largest = magnitudes[np.arange(len(components)), components]
        row = int(largest.argmax())
        if largest[row] > abs(self._peak.value):
            component, median = (
                int(components[row]),
                float(np.median(magnitudes[row].astype(float))),
            )
            self._peak = Peak(
                value=float(features[row, component]),
                component=component,
                feature_row=start + row,
                ratio=float(largest[row]) / median if median else np.inf,
            )

    def stats(self) -> SiteStats:
        """What was found; at least one feature row must have been added."""
        median, p99 = np.percentile(np.concatenate(self._norms), [50, 99])
        order = np.argsort(-self._largest_in, kind="stable")[:_COMMON]
        return SiteStats(
            site=self._site,
            norms=Norms(
                least=self._least,
                median=float(median),
                mean=self._sum / self._rows,
                p99=float(p99),
                most=self._most,
            ),
            peak=self._peak,
            common=tuple(
                Common(int(one), float(self._largest_in[one] / self._rows))
                for one in order
                if self._largest_in[one]
            ),
            vectors=np.concatenate(self._vectors),
        )


def measure(
    dataset: ActivationDataset, norms: Sample, vectors: Sample, wanted: Sequence[str]
) -> list[SiteStats]:
    """Read every feature once and say what is at each site.

    Args:
        dataset: One with at least one feature row.
        norms: The feature rows whose norms are kept, for the median and the 99th percentile.
        vectors: The feature rows that are kept.
        wanted: The sites of which they are.

    Raises:
        IntegrityError: A shard is damaged.
    """
    manifest = dataset.manifest
    tallies = [
        _Tally(site, width, norms, vectors if site in wanted else None)
        for site, width in zip(manifest.sites, manifest.site_widths, strict=True)
    ]
    for numbers, start, features in _batches(dataset):
        for axis, number in enumerate(numbers):
            tallies[number].add(features[:, axis], start)
    return [tally.stats() for tally in tallies]


def _batches(
    dataset: ActivationDataset,
) -> Iterator[tuple[Sequence[int], int, NDArray[np.float32]]]:
    """Site numbers, the number of the first feature row, and [B, sites, D] float32.

    A file is read once: sites that share one come together, the others one after the other.
    """
    manifest = dataset.manifest
    every = range(len(manifest.sites))
    stacked = manifest.shard_layout == "stacked"
    for numbers in [every] if stacked else [[number] for number in every]:
        width = sum(manifest.site_widths[number] for number in numbers)
        size = max(1, _BATCH_BYTES // (4 * width))
        start = 0
        site = None if stacked else manifest.sites[numbers[0]]
        for batch in dataset.iter_batches(size, site=site):
            features = batch.features
            yield numbers, start, features.reshape(len(features), len(numbers), -1)
            start += len(features)

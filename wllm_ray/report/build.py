"""Verify a dataset, look at it, and put what was found on one page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wllm_ray.dataset.format.manifest import Manifest
from wllm_ray.dataset.reading.files import open_manifest
from wllm_ray.dataset.reading.reader import ActivationDataset, FailedRow, load_dataset
from wllm_ray.dataset.reading.verify import VerifyReport, verify_dataset
from wllm_ray.dataset.stores.store import Root, open_store
from wllm_ray.errors import InvalidInputError
from wllm_ray.positions import is_of_tokens, resolve
from wllm_ray.report.measure import Peak, SiteStats, measure
from wllm_ray.report.page import render
from wllm_ray.report.pictures import (
    draw_accuracy,
    draw_lengths,
    draw_norms,
    draw_panels,
    draw_peaks,
)
from wllm_ray.report.probing import Probing, probe_sites
from wllm_ray.report.projection import Categories, colouring, project, spread
from wllm_ray.report.sample import Sample, draw

__all__ = ["Report", "make_report"]

# One norm each: 8 bytes a site.
_NORM_ROWS = 200_000
_PICTURE_ROWS = 2000
_PICTURE_BYTES = 128 << 20
_PANELS = 6
_LABEL = "label"
_LISTED = 20


@dataclass(frozen=True, slots=True)
class Report:
    """The page, and whether the dataset may be used.

    Attributes:
        html: The whole page; text that no encoding can hold is escaped already.
        verified: What verification found. With faults, the page shows them and no features.
    """

    html: str
    verified: VerifyReport


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a site's largest value is: which row, and which of its tokens where that is known."""

    row_id: str
    token: int | None


def make_report(
    root: Root,
    dataset_id: str,
    *,
    label: str | None = None,
    color_by: str | None = None,
    seed: int = 0,
    doing: Callable[[str], None] = lambda _what: None,
) -> Report:
    """Make the page of a committed dataset; the same dataset gives the same page.

    Args:
        root: The storage root.
        dataset_id: The dataset's id.
        label: The metadata field that probes predict; ``label`` where rows have it.
        color_by: The metadata field that colours the projection; else the label.
        seed: Of the samples, the projection and the probes.
        doing: Told what is being done, for people who wait.

    Raises:
        NotFoundError: It is not committed here (``dataset_not_found``).
        IntegrityError: Its manifest is not valid, so that nothing is known of it.
        InvalidInputError: No row has such a metadata field (``invalid_argument``).
        ModuleNotFoundError: The `probe` extra is not installed.
    """
    store = open_store(root)
    manifest = open_manifest(store, dataset_id)
    doing("checking every byte")
    verified = verify_dataset(store, dataset_id)
    facts: dict[str, Any] = {
        "manifest": manifest,
        "verified": verified,
        "differences": _differences(manifest),
        "seed": seed,
    }
    if verified.ok:
        # Every byte has just been checked.
        dataset = load_dataset(store, dataset_id, verify="off")
        facts |= _rows(dataset)
        if len(dataset):
            fields = _Fields.of(dataset, label, color_by)
            facts |= _features(dataset, fields, seed, doing)
    return Report(render(facts), verified)


@dataclass(frozen=True, slots=True)
class _Fields:
    """The metadata fields that the page uses; None for none."""

    label: str | None
    colour: str | None

    @classmethod
    def of(cls, dataset: ActivationDataset, label: str | None, colour: str | None) -> _Fields:
        known = sorted({key for row in dataset.metadata for key in row})
        for asked in (label, colour):
            if asked is not None and asked not in known:
                raise InvalidInputError(
                    f"no good row has a metadata field {asked!a}; there are: "
                    f"{', '.join(map(ascii, known[:_LISTED])) or 'none'}",
                    code="invalid_argument",
                )
        label = label or (_LABEL if _LABEL in known else None)
        return cls(label=label, colour=colour or label)


def _differences(manifest: Manifest) -> list[tuple[str, str]]:
    """What other fingerprints have that the manifest's own has not, and which shards have it."""
    shards: dict[tuple[str, str], list[str]] = {}
    for shard in manifest.shards:
        if shard.fingerprint is not None and manifest.fingerprint is not None:
            own = manifest.fingerprint.model_dump()
            for name, value in shard.fingerprint.model_dump().items():
                if value != own[name]:
                    shards.setdefault((name, str(value)), []).append(str(shard.shard))
    return [
        (name, f"{value} in shards {', '.join(numbers)}")
        for (name, value), numbers in shards.items()
    ]


def _rows(dataset: ActivationDataset) -> dict[str, Any]:
    """What the rows tables alone tell."""
    lengths = np.array([len(ids) for ids in dataset.token_ids], np.int64)
    failures = list(dataset.failures.items())
    return {
        "lengths": lengths,
        "lengths_svg": draw_lengths(lengths) if len(lengths) else None,
        "failures": _by_code(failures),
        "failed": failures[:_LISTED],
    }


def _by_code(failures: Sequence[tuple[str, FailedRow]]) -> list[tuple[str, str, int]]:
    """Code, stage and number of rows, the most common first."""
    counts = Counter((failure.code, failure.stage) for _, failure in failures)
    return [(code, stage, count) for (code, stage), count in counts.most_common()]


def _features(
    dataset: ActivationDataset, fields: _Fields, seed: int, doing: Callable[[str], None]
) -> dict[str, Any]:
    """What the features tell."""
    manifest = dataset.manifest
    shown = spread(manifest.sites, _PANELS)
    norms = draw(manifest.feature_rows, _NORM_ROWS, seed)
    points = _points(manifest, shown, seed)
    doing("measuring norms")
    stats = measure(dataset, norms, points, shown)
    doing("finding principal components")
    projection = _projection(dataset, stats, points, fields.colour, seed)
    doing("fitting probes")
    probing = probe_sites(dataset, fields.label, seed)
    return projection | {
        "stats": stats,
        "norm_sample": norms,
        "norms_svg": draw_norms(stats),
        "peaks_svg": draw_peaks(stats),
        "places": [_place(dataset, one.peak) for one in stats],
        "probing": probing,
        "accuracy_svg": _accuracy(probing),
    }


def _points(manifest: Manifest, shown: Sequence[str], seed: int) -> Sample:
    """The feature rows that the projection shows, as many as fit into memory."""
    widths = dict(zip(manifest.sites, manifest.site_widths, strict=True))
    fit = _PICTURE_BYTES // (4 * sum(widths[site] for site in shown))
    return draw(manifest.feature_rows, min(_PICTURE_ROWS, fit), seed)


def _projection(
    dataset: ActivationDataset,
    stats: Sequence[SiteStats],
    points: Sample,
    colour: str | None,
    seed: int,
) -> dict[str, Any]:
    panels = project(stats, seed)
    rows = _row_of(dataset, points.numbers)
    values = [dataset.metadata[row].get(colour) if colour else None for row in rows.tolist()]
    colours = colouring(values)
    return {
        "panels_svg": draw_panels(panels, colours) if panels else None,
        "points": points,
        "colour": colour,
        "legend": colours.legend if colour and isinstance(colours, Categories) else (),
    }


def _accuracy(probing: Probing) -> str | None:
    return None if probing.found is None else draw_accuracy(probing.found)


def _row_of(dataset: ActivationDataset, feature_rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """The good row that each feature row belongs to."""
    return np.searchsorted(dataset.offsets, feature_rows, side="right") - 1


def _place(dataset: ActivationDataset, peak: Peak) -> _Place:
    row = int(_row_of(dataset, np.array([peak.feature_row]))[0])
    token = _token(dataset, row, peak.feature_row - int(dataset.offsets[row]))
    return _Place(dataset.row_ids[row], token)


def _token(dataset: ActivationDataset, row: int, number: int) -> int | None:
    """Which token of the row its feature row of this number is of; None where it is of no one."""
    position = dataset.manifest.position
    if not is_of_tokens(position):
        return None
    return int(resolve(position, len(dataset.token_ids[row]))[number])

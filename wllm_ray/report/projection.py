"""The first two principal components of some sites, and what their points are coloured by."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wllm_ray.digest import canonical_json
from wllm_ray.extras import require_extra
from wllm_ray.report.measure import SiteStats
from wllm_ray.sites import parse_site

__all__ = ["Categories", "Colouring", "Panel", "Scale", "colouring", "project", "spread"]

GREY = "#9a9a9a"
# Okabe and Ito's colours, which people with any colour vision tell apart.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
# Numbers with more values than this are a scale, fewer are categories.
_MOST_DISTINCT = 10
_MOST_MAGNITUDE = 1e300
_LEAST_POINTS = 3


@dataclass(frozen=True, slots=True, eq=False)
class Panel:
    """One site: its points, [n, 2] float64, and the share of the variance on each axis."""

    site: str
    points: NDArray[np.float64]
    shares: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Categories:
    """A colour for each point, and what the colours mean: colour, value, how many points."""

    colours: tuple[str, ...]
    legend: tuple[tuple[str, str, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Scale:
    """A number for each point, [n] float64, NaN where it has none."""

    numbers: NDArray[np.float64]


Colouring = Categories | Scale


def spread(sites: Sequence[str], most: int) -> list[str]:
    """Sites to show: of the kind that there is most of, evenly from its first to its last layer."""
    kinds = Counter(parse_site(site).kind for site in sites)
    (common, _), *_ = kinds.most_common(1)
    alike = [site for site in sites if parse_site(site).kind == common]
    places = np.linspace(0, len(alike) - 1, min(most, len(alike)))
    return [alike[place] for place in places.round().astype(int)]


def project(stats: Sequence[SiteStats], seed: int) -> list[Panel]:
    """The principal components of each site's vectors, centred and not scaled.

    Sites with fewer than three vectors, one component or no variance are left out.
    """
    analysis = require_extra("sklearn.decomposition").PCA
    panels = []
    for one in stats:
        vectors = one.vectors.astype(np.float64)
        if (
            min(vectors.shape[0], vectors.shape[1] + 1) < _LEAST_POINTS
            or not np.ptp(vectors, axis=0).any()
        ):
            continue
        fitted = analysis(n_components=2, random_state=seed).fit(vectors)
        first, second = fitted.explained_variance_ratio_.tolist()
        panels.append(Panel(one.site, fitted.transform(vectors), (first, second)))
    return panels


def colouring(values: Sequence[Any]) -> Colouring:
    """How points are coloured by a metadata field.

    Args:
        values: The field's value for each point; None where it has none. Many different numbers
            make a scale; anything else is a category, of which the most common get a colour.
    """
    numbers = [_number(value) for value in values]
    distinct = {number for number in numbers if number is not None}
    others = any(
        value is not None and number is None for value, number in zip(values, numbers, strict=True)
    )
    if len(distinct) > _MOST_DISTINCT and not others:
        return Scale(np.array([np.nan if one is None else one for one in numbers], np.float64))
    return _categories(values)


def _categories(values: Sequence[Any]) -> Categories:
    # By canonical text: 1, True and "1" are three values, and a list cannot be a key.
    texts = [None if value is None else canonical_json(value).decode() for value in values]
    counts = Counter(text for text in texts if text is not None)
    ranked = [text for text, _ in counts.most_common(len(_COLOURS))]
    chosen = {text: colour for colour, text in zip(_COLOURS, sorted(ranked), strict=False)}
    names = dict(zip(texts, values, strict=True))
    legend = [(colour, _named(names[text]), counts[text]) for text, colour in chosen.items()]
    if more := sum(counts.values()) - sum(count for *_, count in legend):
        others = len(counts) - len(chosen)
        legend.append((GREY, f"{others} other value{'s' * (others > 1)}", more))
    if absent := texts.count(None):
        legend.append((GREY, "no value", absent))
    return Categories(tuple(chosen.get(text or "", GREY) for text in texts), tuple(legend))


def _named(value: Any) -> str:
    return value if isinstance(value, str) else canonical_json(value).decode()


def _number(value: Any) -> float | None:
    """A value as a number that can be drawn."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < _MOST_MAGNITUDE else None

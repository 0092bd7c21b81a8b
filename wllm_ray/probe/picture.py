"""The picture: accuracy by layer, with intervals, the chance line and the controls."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from typing import Any

from wllm_ray.probe.fitting import ProbeReport, SiteResult, require_extra

__all__ = ["plot_probe_report"]

_COLOURS = ("#1f5fa8", "#c2571a", "#3a7d44", "#8b3a8f", "#a8872a")
_GREY = "#7f7f7f"
_GREEN = "#5b8c5a"
_DPI = 150
_REVISION_CHARACTERS = 12


def plot_probe_report(report: ProbeReport, path: Path | str) -> None:
    """Draw accuracy by layer, as a PNG or what else the path's suffix says.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = require_extra("matplotlib.figure").Figure(figsize=(9, 5.4), layout="constrained")
    axes = figure.add_subplot()
    places = _places(report)
    for colour, kind in zip(cycle(_COLOURS), _kinds(report), strict=False):
        chosen = [result for result in report.results if result.site.kind == kind]
        _draw(axes, places, chosen, "score", kind, colour=colour, marker="o")
    _draw_controls(axes, places, report)
    axes.axhline(report.chance, color="black", linewidth=1, linestyle=":", label="chance")
    _annotate(axes, places, report)
    figure.savefig(path, dpi=_DPI)


def _kinds(report: ProbeReport) -> list[str]:
    return list(dict.fromkeys(result.site.kind for result in report.results))


def _places(report: ProbeReport) -> dict[str, float]:
    """Where each site stands on the horizontal axis: its layer; the others lie at the ends."""
    layers = [result.site.layer for result in report.results]
    last = max((layer for layer in layers if layer is not None), default=0)
    ends = {"embed": -1.0, "final_norm": last + 1.0}
    return {
        str(result.site): ends[result.site.kind] if layer is None else float(layer)
        for result, layer in zip(report.results, layers, strict=True)
    }


def _draw(
    axes: Any,
    places: dict[str, float],
    results: list[SiteResult],
    what: str,
    name: str,
    *,
    colour: str,
    marker: str,
) -> None:
    ordered = sorted(results, key=lambda result: places[str(result.site)])
    x = [places[str(result.site)] for result in ordered]
    scores = [getattr(result, what) for result in ordered]
    y = [score.accuracy for score in scores]
    axes.plot(x, y, color=colour, marker=marker, markersize=4.5, linewidth=1.8, label=name)
    low, high = [score.low for score in scores], [score.high for score in scores]
    axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)


def _draw_controls(axes: Any, places: dict[str, float], report: ProbeReport) -> None:
    """The controls of the first kind only: those of further kinds look the same."""
    first = [result for result in report.results if result.site.kind == _kinds(report)[0]]
    _draw(
        axes,
        places,
        first,
        "negative_control",
        "negative control (shuffled training labels)",
        colour=_GREY,
        marker="x",
    )
    if report.positive_label is not None:
        name = f"positive control ({report.positive_label})"
        _draw(axes, places, first, "positive_control", name, colour=_GREEN, marker="^")


def _annotate(axes: Any, places: dict[str, float], report: ProbeReport) -> None:
    names = {int(place): str(int(place)) for place in places.values()}
    names |= {int(places[end]): end for end in ("embed", "final_norm") if end in places}
    axes.set_xticks(list(names), list(names.values()))
    axes.set_xlabel("layer (zero-based decoder block)")
    axes.set_ylabel("accuracy on unseen groups")
    axes.set_ylim(0, 1.03)
    axes.grid(visible=True, axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="best", frameon=False)
    revision = report.revision.removeprefix("sha256:")[:_REVISION_CHARACTERS]
    axes.set_title(
        f"Probe of “{report.label}” by layer\n"
        f"{report.model} @ {revision} · dataset {report.dataset_id} · "
        f"{len(report.train_ids)} training and {len(report.test_ids)} test rows",
        fontsize=11,
    )

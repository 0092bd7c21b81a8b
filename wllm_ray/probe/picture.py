"""The picture: accuracy by layer, with intervals, the chance line and the controls."""

from __future__ import annotations

import math
from itertools import cycle
from pathlib import Path
from typing import Any

from wllm_ray.extras import require_extra
from wllm_ray.probe.fitting import ProbeReport, SiteResult
from wllm_ray.probe.layers import label_layers, layer_places

__all__ = ["plot_probe_report"]

_COLOURS = ("#1f5fa8", "#c2571a", "#3a7d44", "#8b3a8f", "#a8872a")
_GREY = "#7f7f7f"
_GREEN = "#5b8c5a"
_DPI = 150
_SHADE = 0.16
# Enough room under the chance level of two classes; lower where something lies lower.
_BOTTOM = 0.3
_BOTTOM_STEP = 0.05
_REVISION_CHARACTERS = 12


def plot_probe_report(
    report: ProbeReport, path: Path | str, *, question: str | None = None
) -> None:
    """Draw accuracy by layer, as a PNG or what else the path's suffix says.

    Args:
        report: What was found.
        path: The file to write.
        question: The title's first line; without one it names the label.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    figure = require_extra("matplotlib.figure").Figure(figsize=(9, 5.4), layout="constrained")
    axes = figure.add_subplot()
    places = layer_places([result.site for result in report.results])
    for colour, kind in zip(cycle(_COLOURS), _kinds(report), strict=False):
        chosen = [result for result in report.results if result.site.kind == kind]
        name = f"probe of “{report.label}” at {kind}"
        _draw(axes, places, chosen, "score", name, colour=colour, marker="o")
    _draw_controls(axes, places, report)
    chance = _text(f"chance for “{report.label}” ({report.chance:.2f})")
    axes.axhline(report.chance, color="black", linewidth=1, linestyle=":", label=chance)
    _mark_best(axes, places, report)
    axes.fill_between([], [], color=_GREY, alpha=_SHADE, linewidth=0, label="shaded: 95 % interval")
    _annotate(axes, places, report)
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    axes.set_title(_title(report, question), fontsize=11)
    figure.savefig(path, dpi=_DPI)


def _kinds(report: ProbeReport) -> list[str]:
    return list(dict.fromkeys(result.site.kind for result in report.results))


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
    axes.plot(x, y, color=colour, marker=marker, markersize=4.5, linewidth=1.8, label=_text(name))
    low, high = [score.low for score in scores], [score.high for score in scores]
    axes.fill_between(x, low, high, color=colour, alpha=_SHADE, linewidth=0)


def _draw_controls(axes: Any, places: dict[str, float], report: ProbeReport) -> None:
    """The controls of the first kind only: those of further kinds look the same."""
    first = [result for result in report.results if result.site.kind == _kinds(report)[0]]
    shuffled = "negative control: shuffled training labels"
    _draw(axes, places, first, "negative_control", shuffled, colour=_GREY, marker="x")
    if report.positive_chance is not None:
        own = f"its own chance {report.positive_chance:.2f}"
        name = f"positive control: probe of “{report.positive_label}” ({own})"
        _draw(axes, places, first, "positive_control", name, colour=_GREEN, marker="^")


def _mark_best(axes: Any, places: dict[str, float], report: ProbeReport) -> None:
    best = report.best
    x, y = places[best.probe.site], best.score.accuracy
    axes.plot([x], [y], "o", color="black", markersize=11, markerfacecolor="none")
    axes.annotate(
        f"best: {best.probe.site}, {y:.2f}",
        (x, y),
        xytext=(0, -36),
        textcoords="offset points",
        ha="center",
        arrowprops={"arrowstyle": "-", "color": "black", "shrinkB": 6},
    )


def _bottom(report: ProbeReport) -> float:
    """Where the vertical axis begins: under everything that is drawn."""
    scores = [
        score
        for result in report.results
        for score in (result.score, result.negative_control, result.positive_control)
        if score is not None
    ]
    least = min(report.chance, *(score.low for score in scores))
    return max(0.0, min(_BOTTOM, math.floor(least / _BOTTOM_STEP) * _BOTTOM_STEP))


def _title(report: ProbeReport, question: str | None) -> str:
    revision = report.revision.removeprefix("sha256:")[:_REVISION_CHARACTERS]
    return _text(
        f"{question or f'Can a linear probe read “{report.label}”, layer by layer?'}\n"
        f"{report.model} @ {revision} · dataset {report.dataset_id} · "
        f"{len(report.train_ids)} training and {len(report.test_ids)} test rows"
    )


def _text(text: str) -> str:
    """What stands between dollars would be taken for a formula."""
    return text.replace("$", r"\$")


def _annotate(axes: Any, places: dict[str, float], report: ProbeReport) -> None:
    label_layers(axes, places)
    axes.set_ylabel("accuracy on unseen groups")
    axes.set_ylim(_bottom(report), 1.03)
    axes.grid(visible=True, axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)

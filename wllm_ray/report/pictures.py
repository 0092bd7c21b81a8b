"""The pictures of the page, as SVG text.

No text of a dataset's owner is drawn: only numbers and site names. What people called things stands
in the page beside the picture, where it is escaped, and where every script and sign has a font.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wllm_ray.extras import require_extra
from wllm_ray.probe.fitting import ProbeReport
from wllm_ray.probe.layers import label_layers, layer_places
from wllm_ray.probe.scores import Score
from wllm_ray.report.measure import SiteStats
from wllm_ray.report.projection import GREY, Colouring, Panel, Scale
from wllm_ray.sites import parse_site

__all__ = ["draw_accuracy", "draw_lengths", "draw_norms", "draw_panels", "draw_peaks"]

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
_WIDTH = 9.6
_HEIGHT = 3.4
_PANEL_HEIGHT = 3.1
_COLUMNS = 3
_SHADE = 0.15
_DPI = 150
_MOST_BINS = 60


@dataclass(frozen=True, slots=True)
class _Line:
    """The sites of one kind in the order of their layers."""

    kind: str
    colour: str
    x: list[float]
    sites: list[str]


def draw_lengths(lengths: NDArray[np.int64]) -> str:
    """A histogram of [rows] token counts."""
    least, most = int(lengths.min()), int(lengths.max())
    step = -(-(most - least + 1) // _MOST_BINS)
    edges = np.arange(least, most + step + 1, step) - 0.5
    counts, _ = np.histogram(lengths, edges)
    figure = _figure(2.4)
    axes = _axes(figure, "rows")
    axes.bar(edges[:-1] + step / 2, counts, width=0.9 * step, color=_COLOURS[0])
    axes.set_xlabel("tokens in the row")
    axes.locator_params(integer=True)
    return _svg(figure)


def draw_norms(stats: Sequence[SiteStats]) -> str:
    """Median and 99th percentile of the norms, and their range, by layer."""
    norms = {one.site: one.norms for one in stats}
    figure = _figure(_HEIGHT)
    axes = _axes(figure, "L2 norm")
    for line in _lines(axes, norms):
        here = [norms[site] for site in line.sites]
        _plot(axes, line, [one.median for one in here], label=line.kind)
        axes.plot(line.x, [one.p99 for one in here], ":", color=line.colour, linewidth=1.2)
        _shade(axes, line, [one.least for one in here], [one.most for one in here])
    axes.set_yscale("log")
    _legend(figure, axes, "line: median · dotted: 99th percentile · shaded: smallest to largest")
    return _svg(figure)


def draw_peaks(stats: Sequence[SiteStats]) -> str:
    """The largest magnitude, and its ratio to the median of its vector, by layer."""
    peaks = {one.site: one.peak for one in stats}
    figure = _figure(_HEIGHT)
    axes = _axes(figure, "largest magnitude (line)\nover its vector’s median (dashed)")
    for line in _lines(axes, peaks):
        here = [peaks[site] for site in line.sites]
        _plot(axes, line, [abs(one.value) for one in here], label=line.kind)
        ratios = [one.ratio if np.isfinite(one.ratio) else np.nan for one in here]
        axes.plot(line.x, ratios, "--", color=line.colour, linewidth=1.2)
    axes.set_yscale("log")
    _legend(figure, axes, "")
    return _svg(figure)


def draw_accuracy(report: ProbeReport) -> str:
    """Probe accuracy by layer with its intervals, the chance line and the control.

    The control is that of the first kind of site only: those of further kinds look the same.
    """
    results = {result.probe.site: result for result in report.results}
    figure = _figure(_HEIGHT)
    axes = _axes(figure, "accuracy on unseen groups")
    lines = list(_lines(axes, results))
    for line in lines:
        _plot_scores(axes, line, [results[site].score for site in line.sites], label=line.kind)
    control = replace(lines[0], colour=GREY)
    _plot_scores(axes, control, [results[site].negative_control for site in control.sites])
    axes.axhline(report.chance, color="black", linewidth=1, linestyle=":")
    axes.set_ylim(top=1.02)
    _legend(figure, axes, "shaded: 95 % interval · grey: shuffled labels · dotted: chance")
    return _svg(figure)


def draw_panels(panels: Sequence[Panel], colours: Colouring) -> str:
    """One scatter plot for each panel."""
    columns = min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    figure = _figure(_PANEL_HEIGHT * rows)
    drawn = [
        _scatter(figure.add_subplot(rows, columns, number), panel, colours)
        for number, panel in enumerate(panels, 1)
    ]
    if isinstance(colours, Scale):
        figure.colorbar(drawn[-1], ax=figure.axes, aspect=40, pad=0.01)
    return _svg(figure)


def _scatter(axes: Any, panel: Panel, colours: Colouring) -> Any:
    """Points are drawn as an image, since thousands of shapes would make a heavy page."""
    options = {"s": 9, "alpha": 0.75, "linewidths": 0, "rasterized": True}
    x, y = panel.points.T
    first, second = panel.shares
    axes.set_title(panel.site)
    axes.set_xlabel(f"component 1 ({first:.0%} of the variance)")
    axes.set_ylabel(f"component 2 ({second:.0%})")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xticks([])
    axes.set_yticks([])
    if not isinstance(colours, Scale):
        return axes.scatter(x, y, c=list(colours.colours), **options)
    absent = np.isnan(colours.numbers)
    axes.scatter(x[absent], y[absent], c=GREY, **options)
    known = ~absent
    return axes.scatter(x[known], y[known], c=colours.numbers[known], cmap="viridis", **options)


def _figure(height: float) -> Any:
    return require_extra("matplotlib.figure").Figure((_WIDTH, height), layout="constrained")


def _axes(figure: Any, y: str) -> Any:
    axes = figure.add_subplot()
    axes.set_ylabel(y)
    axes.grid(visible=True, axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return axes


def _lines(axes: Any, names: Iterable[str]) -> Iterator[_Line]:
    """A line for each kind of site, on an axis of layers."""
    sites = [parse_site(name) for name in names]
    places = layer_places(sites)
    label_layers(axes, places)
    for colour, kind in zip(cycle(_COLOURS), dict.fromkeys(site.kind for site in sites)):
        ordered = sorted((str(s) for s in sites if s.kind == kind), key=places.__getitem__)
        yield _Line(kind, colour, [places[name] for name in ordered], ordered)


def _plot(axes: Any, line: _Line, y: Sequence[float], **options: Any) -> None:
    axes.plot(line.x, y, "o-", color=line.colour, markersize=4, linewidth=1.7, **options)


def _shade(axes: Any, line: _Line, low: Sequence[float], high: Sequence[float]) -> None:
    axes.fill_between(line.x, low, high, color=line.colour, alpha=_SHADE, linewidth=0)


def _plot_scores(axes: Any, line: _Line, scores: Sequence[Score], **options: Any) -> None:
    _plot(axes, line, [score.accuracy for score in scores], **options)
    _shade(axes, line, [score.low for score in scores], [score.high for score in scores])


def _legend(figure: Any, axes: Any, title: str) -> None:
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=6,
        frameon=False,
        title=title,
        title_fontsize="medium",
    )


def _svg(figure: Any) -> str:
    """The same picture is the same text: ids come from a fixed salt, and no date is written."""
    file = io.StringIO()
    with require_extra("matplotlib").rc_context({"svg.hashsalt": "wllm_ray"}):
        figure.savefig(file, format="svg", dpi=_DPI, metadata={"Date": None, "Creator": None})
    return file.getvalue()

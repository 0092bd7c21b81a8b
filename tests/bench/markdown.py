"""The report: Markdown, made from the JSON results alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_MEASURES = ("| measure | found | bound | |", "|---|---|---|---|")
_QUICK = "**A quick run**: sizes too small to judge, so no bound is."


def render(results: dict[str, Any]) -> str:
    lines = ["# Benchmark", "", *_machine(results["machine"])]
    if results["quick"]:
        lines += ["", _QUICK]
    for one in results["benchmarks"]:
        lines += ["", f"## {one['name']} ({one['requirement']})", "", one["what"], ""]
        lines += _numbers(one) if one["status"] == "run" else [f"{one['status']}: {one['reason']}"]
    return "\n".join(lines) + "\n"


def shown(value: float) -> str:
    """Three digits, or all those before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _machine(facts: dict[str, Any]) -> Iterator[str]:
    load = ", ".join(map(str, facts["load_average"]))
    versions = ", ".join(f"{name} {found}" for name, found in facts["versions"].items())
    yield f"- {facts['date']}, commit {facts['commit'] or 'unknown'}"
    yield f"- {facts['processor']}, {facts['cores']} cores, {_gib(facts['memory_bytes'])} of memory"
    yield f"- accelerators: {', '.join(facts['accelerators']) or 'none'}"
    yield f"- load average when it began: {load}"
    yield f"- {facts['system']}, Python {facts['python']}, {versions}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _numbers(one: dict[str, Any]) -> Iterator[str]:
    yield from _MEASURES
    for measure in one["measures"]:
        value = f"{shown(measure['value'])} {measure['unit']}".rstrip()
        yield f"| {measure['name']} | {value} | {_bound(measure)} | {_verdict(measure['met'])} |"
    said = ", ".join(f"{name} {value}" for name, value in one["parameters"].items())
    yield ""
    yield f"{said}; took {one['took_s']:.0f} s".removeprefix("; ")


def _bound(measure: dict[str, Any]) -> str:
    if measure["least"] is not None:
        return f"at least {shown(measure['least'])}"
    return "" if measure["most"] is None else f"at most {shown(measure['most'])}"


def _verdict(met: bool | None) -> str:
    return "" if met is None else "met" if met else "**MISSED**"

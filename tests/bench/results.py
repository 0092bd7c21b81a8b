"""Runs benchmarks into one JSON value, which is all that the report is made from."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Any

from tests.bench.harness import Benchmark, Measure, NotRunError, Outcome, Settings, stopwatch
from tests.bench.machine import machine_facts

FORMAT = "wllm_ray.bench/1"
NOT_ASKED = "not asked for"


def run_benchmarks(
    benchmarks: Sequence[Benchmark], settings: Settings, only: Sequence[str] = ()
) -> dict[str, Any]:
    """Run them one after the other; one that fails does not keep the others from running."""
    return {
        "format": FORMAT,
        "quick": settings.quick,
        "machine": machine_facts(),
        "benchmarks": [
            _run(one, settings, asked=not only or one.name in only) for one in benchmarks
        ],
    }


def exit_code(results: dict[str, Any]) -> int:
    """1 where a bound was missed or a benchmark failed."""
    wrong = [
        one
        for one in results["benchmarks"]
        if one["status"] == "failed" or any(m["met"] is False for m in one.get("measures", ()))
    ]
    return 1 if wrong else 0


def _run(benchmark: Benchmark, settings: Settings, *, asked: bool) -> dict[str, Any]:
    entry = {
        "name": benchmark.name,
        "requirement": benchmark.requirement,
        "what": benchmark.what,
    }
    if not asked:
        return entry | {"status": "not run", "reason": NOT_ASKED}
    sys.stderr.write(f"{benchmark.name} …\n")
    try:
        with stopwatch() as watch:
            outcome = benchmark.run(settings)
    except NotRunError as why:
        return entry | {"status": "not run", "reason": str(why)}
    except Exception as error:  # noqa: BLE001 (reported, and the exit code says it)
        traceback.print_exc()
        return entry | {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    return entry | {"status": "run", "took_s": watch.seconds} | _found(outcome, settings)


def _found(outcome: Outcome, settings: Settings) -> dict[str, Any]:
    return {
        "parameters": outcome.parameters,
        "measures": [_measure(one, judged=not settings.quick) for one in outcome.measures],
        "seconds": outcome.seconds,
    }


def _measure(measure: Measure, *, judged: bool) -> dict[str, Any]:
    return {
        "name": measure.name,
        "value": measure.value,
        "unit": measure.unit,
        "least": measure.least,
        "most": measure.most,
        "met": measure.met if judged else None,
    }

"""B-5: rows per second and memory from a JSONL file to a committed dataset, without a model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from tests.bench.block_engine import write_rows
from tests.bench.harness import CHECKOUT, Benchmark, Measure, Outcome, Settings

WIDTH = 128
LEAST_ROWS_PER_S = 20_000
# What L-3 allows to be kept of each row.
MOST_BYTES_PER_ROW = 32
# Of small runs, whose peaks differ by some MiB from one to the next.
SMALL_RUNS = 3


def _measured(way: str, settings: Settings) -> Outcome:
    small, large = settings.pick((10_000, 1_000_000), (200, 600))
    few = [run_pipeline(way, settings, small) for _ in range(settings.pick(SMALL_RUNS, 1))]
    many = run_pipeline(way, settings, large)
    peak = median(one["peak_bytes"] for one in few)
    growth = (many["peak_bytes"] - peak) / (large - small)
    rate = many["rows"] / many["seconds"]
    few_rate = median(one["rows"] / one["seconds"] for one in few)
    spent = 1e6 * many["processor_seconds"] / many["rows"]
    return Outcome(
        [
            Measure(f"{small:,} rows", few_rate, "rows/s"),
            Measure(f"{large:,} rows", rate, "rows/s", least=LEAST_ROWS_PER_S),
            Measure("processor time", spent, "µs per row"),
            Measure(f"peak memory at {small:,} rows", peak / 2**20, "MiB"),
            Measure(f"peak memory at {large:,} rows", many["peak_bytes"] / 2**20, "MiB"),
            Measure("memory that grows", growth, "bytes per row", most=MOST_BYTES_PER_ROW),
        ],
        {"width": WIDTH, "rows per shard": 4096, "passes over the file": 2},
        {"few": [one["seconds"] for one in few], "many": [many["seconds"]]},
    )


def run_pipeline(way: str, settings: Settings, count: int, width: int = WIDTH) -> dict[str, Any]:
    """Write a dataset in a process of its own, and remove it."""
    rows, root = rows_file(settings, count), settings.work / "pipeline"
    try:
        return run_worker(way, width, rows, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def rows_file(settings: Settings, count: int) -> Path:
    path = settings.work / f"rows-{count}.jsonl"
    if not path.exists():
        write_rows(path, count)
    return path


def run_worker(way: str, width: int, rows: Path, root: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.bench.pipeline_worker", way, str(width)]
    command += [str(rows), str(root)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=CHECKOUT)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


PIPELINES = tuple(
    Benchmark(
        way.replace("_", "-"),
        "B-5",
        f"A JSONL file through `{way}` over an engine that costs nothing, to a committed dataset: "
        f"both passes over the file, tokenised, planned, staged, committed.",
        partial(_measured, way),
    )
    for way in ("run_job", "stream_to_disk")
)

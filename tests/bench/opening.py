"""P-4 and S-2: what opening a dataset and importing the library cost before any work is done."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from statistics import median

from tests.bench.block_engine import DATASET
from tests.bench.harness import CHECKOUT, Benchmark, Measure, Outcome, Settings, interleaved, timed
from tests.bench.pipeline import rows_file, run_worker
from wllm_ray.dataset.reading.reader import load_dataset

MOST_TO_OPEN_S = 0.2
MOST_TO_IMPORT_S = 0.3
_TIMED = "import time; t = time.perf_counter(); {}; print(time.perf_counter() - t)"
_IMPORTS = ("import wllm_ray", "from wllm_ray import load_dataset")


def _opening(settings: Settings) -> Outcome:
    rows = settings.pick(1_000_000, 500)
    root = settings.work / "many-rows"
    if not root.exists():
        run_worker("stream_to_disk", 8, rows_file(settings, rows), root)
    seconds = [timed(lambda: load_dataset(root, DATASET))() for _ in range(settings.pick(9, 2))]
    return Outcome(
        [Measure("load_dataset", median(seconds), "s", most=MOST_TO_OPEN_S)],
        {"rows": rows},
        {"load_dataset": seconds},
    )


def _importing(settings: Settings) -> Outcome:
    library, reader = _IMPORTS
    calls = {one: partial(_import_once, one) for one in _IMPORTS}
    seconds = interleaved(settings.pick(9, 1), calls)
    return Outcome(
        [
            Measure(library, median(seconds[library]), "s", most=MOST_TO_IMPORT_S),
            Measure(f"{reader}, with NumPy and PyArrow", median(seconds[reader]), "s"),
        ],
        {"processes": len(seconds[library])},
        seconds,
    )


def _import_once(statement: str) -> float:
    done = subprocess.run(
        [sys.executable, "-c", _TIMED.format(statement)],
        stdout=subprocess.PIPE,
        check=True,
        cwd=CHECKOUT,
    )
    return float(done.stdout)


OPENING = (
    Benchmark("opening", "P-4", "`load_dataset` of many rows, none of them read.", _opening),
    Benchmark("importing", "S-2", "`import wllm_ray` in a new process, files cached.", _importing),
)

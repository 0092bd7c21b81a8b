"""All benchmarks, in the order in which they are run."""

from __future__ import annotations

from tests.bench.engine import ENGINES
from tests.bench.harness import Benchmark
from tests.bench.opening import OPENING
from tests.bench.pipeline import PIPELINES
from tests.bench.storage import STORAGE

BENCHMARKS: tuple[Benchmark, ...] = (*OPENING, *STORAGE, *PIPELINES, *ENGINES)

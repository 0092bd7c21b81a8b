"""B-1 and B-2: capture with vLLM against plain vLLM on the same prompts, at several depths."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from tests.bench.harness import (
    CHECKOUT,
    Benchmark,
    Measure,
    NotRunError,
    Outcome,
    Settings,
    interleaved,
    speed_ratio,
)

LEAST_OF_BARE = 0.97
LEAST_OF_IDEAL = 0.9
ROWS = 24
TOKENS = (64, 200)
ROUNDS = 5


class Worker:
    """A process with one engine; see :mod:`tests.bench.engine_worker`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.facts: dict[str, Any] = self._answer()

    def seconds(self, **asked: Any) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the engine's process ended; what it said is above")
        return json.loads(line)


@contextmanager
def _worker(kind: str, settings: Settings, dtype: str = "auto") -> Iterator[Worker]:
    command = [sys.executable, "-m", "tests.bench.engine_worker", kind, str(settings.model), dtype]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=CHECKOUT) as process:
        try:
            yield Worker(process)
        finally:
            process.kill()


def _measured(settings: Settings) -> Outcome:
    _expect_model(settings)
    with ExitStack() as stack:
        capture = stack.enter_context(_worker("capture", settings))
        bare = stack.enter_context(_worker("bare", settings, capture.facts["dtype"]))
        prompts = _prompts(capture.facts["vocab_size"])
        calls: dict[str, Callable[[], float]] = {
            f"L{layer}": _call(capture, prompts, layer) for layer in _depths(capture)
        }
        calls["all_prompt"] = _call(capture, prompts, _depths(capture)[-1], "all_prompt")
        calls["bare"] = lambda: bare.seconds(prompts=prompts)
        seconds = interleaved(ROUNDS, calls)
    tokens = sum(map(len, prompts))
    parameters = {"model": settings.model.name, "rows": ROWS, "tokens": tokens} | capture.facts
    parameters["threads of plain vLLM"] = bare.facts["threads"]
    return Outcome(list(_ratios(seconds, _depths(capture))), parameters, seconds)


def _expect_model(settings: Settings) -> None:
    if settings.quick:
        raise NotRunError("a quick run loads no model")
    if not settings.model.is_dir():
        raise NotRunError(
            f"no model at {settings.model}; `make demo` makes it, --model chooses one"
        )
    try:
        import vllm  # noqa: F401
    except ImportError:
        raise NotRunError("vLLM is not installed") from None


def _prompts(vocab_size: int) -> list[list[int]]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(*TOKENS, ROWS)
    return [rng.integers(0, vocab_size, length).tolist() for length in lengths]


def _depths(capture: Worker) -> list[int]:
    """The block at a quarter of the model, the one in the middle, and the last."""
    layers = capture.facts["layers"]
    return [-(-layers // 4) - 1, -(-layers // 2) - 1, layers - 1]


def _call(
    capture: Worker, prompts: list[list[int]], layer: int, position: str = "last_prompt"
) -> Callable[[], float]:
    site = f"L{layer}_resid_post"
    return lambda: capture.seconds(prompts=prompts, site=site, position=position)


def _ratios(seconds: dict[str, list[float]], depths: list[int]) -> Iterator[Measure]:
    layers = depths[-1] + 1
    for layer in depths:
        ideal = layers / (layer + 1)
        least = LEAST_OF_BARE if layer + 1 == layers else LEAST_OF_IDEAL * ideal
        name = f"block {layer} of {layers}, of plain vLLM"
        yield Measure(name, speed_ratio(seconds, f"L{layer}", "bare"), "×", least=least)
    everything = speed_ratio(seconds, "all_prompt", "bare")
    yield Measure("all positions of the last block", everything, "×", least=LEAST_OF_BARE)


ENGINES = (
    Benchmark(
        "depth",
        "B-1, B-2",
        "One site captured by vLLM, against plain vLLM's prefill of the same prompts; both eager, "
        "with equal dtype and threads, without prefix cache.",
        _measured,
    ),
)

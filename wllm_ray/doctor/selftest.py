"""The engine's own self-test, run here: is what would be captured right?"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from wllm_ray.doctor.check import Check, Settings
from wllm_ray.errors import WLLMError

if TYPE_CHECKING:
    from wllm_ray.records import SelfTestReport

__all__ = ["check_self_test"]

NAME = "self-test"


def check_self_test(settings: Settings) -> Iterator[Check]:
    """Load the model and report what its engine proves before a replica is ready."""
    if not settings.self_test:
        return
    if settings.model is None:
        yield Check(NAME, "fail", "no model was named", "name one with --model")
        return
    try:
        report = _run(settings.model, settings)
    except ImportError as error:
        advice = "install what runs models: `pip install '.[vllm]'` or '.[cpu]' in a checkout"
        yield Check(NAME, "fail", f"{error.name or 'a package'} cannot be imported", advice)
        return
    except WLLMError as error:
        advice = "the application would not get ready with this model; the message says why"
        yield Check(NAME, "fail", f"[{error.code}] {error.message}", advice)
        return
    except Exception as error:  # noqa: BLE001 (whatever stops an engine is what was asked for)
        advice = "the lines that the engine wrote on stderr say why"
        yield Check(NAME, "fail", f"the engine did not start ({type(error).__name__})", advice)
        return
    yield from _lines(report)


def _run(model: str, settings: Settings) -> SelfTestReport:
    """Start the engine, which tests itself, and end it again."""
    # What the engine logs must not stand between the lines of a report for programs.
    with contextlib.redirect_stdout(sys.stderr):
        from wllm_ray.engines import VLLMEngine

        with VLLMEngine(
            model,
            dtype=settings.dtype,
            max_model_len=settings.max_model_len,
            gpu_memory_utilization=settings.gpu_memory_utilization,
        ) as engine:
            return engine.description.selftest


def _lines(report: SelfTestReport) -> Iterator[Check]:
    for name, found in report.checks.items():
        yield Check(f"{NAME}, {name}", "ok", found)
    bound = f"rows differ by at most {report.measured_relative_l2:.2e} (relative L2)"
    found = report.reproducibility + (f": {bound}" if report.reproducibility == "tolerance" else "")
    yield Check(f"{NAME}, reproducibility class", "ok", found)
    took = f"in {report.seconds:.1f} s, prompts of {', '.join(map(str, report.prompt_lengths))}"
    if report.passed:
        yield Check(NAME, "ok", f"passed {took} tokens")
    else:
        advice = "do not capture with this model; report it with the lines above"
        yield Check(NAME, "fail", f"did not pass {took} tokens", advice)

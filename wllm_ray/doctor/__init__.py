"""Whether this machine can do the work, found by looking and never by importing heavy libraries.

Only the self-test, which has to be asked for, loads the model.

Each check says what was found and, unless all is well, what to do. ``fail`` means that the
application would not start or not work with these settings, ``warn`` that something is missing
which not everybody needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from wllm_ray.doctor.check import Check, Settings, check_settings
from wllm_ray.doctor.machine import check_device, check_storage
from wllm_ray.doctor.model import check_model
from wllm_ray.doctor.selftest import check_self_test
from wllm_ray.doctor.software import (
    check_config,
    check_python,
    check_ray,
    check_torch,
    check_vllm,
)

__all__ = ["Check", "Settings", "run_checks"]

CHECKS: tuple[Callable[[Settings], Iterator[Check]], ...] = (
    check_python,
    check_vllm,
    check_torch,
    check_device,
    check_settings,
    check_config,
    check_model,
    check_storage,
    check_ray,
    check_self_test,
)


def run_checks(settings: Settings) -> list[Check]:
    """Run all checks that the settings call for."""
    return [found for check in CHECKS for found in check(settings)]

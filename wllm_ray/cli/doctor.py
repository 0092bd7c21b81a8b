"""``wllm doctor``: whether this machine can do the work, and what to do if not."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from wllm_ray.cli.options import LOCAL_DASHBOARD, AsJson
from wllm_ray.cli.reporting import FAILED, print_json, reports_errors

if TYPE_CHECKING:
    from wllm_ray.doctor import Check

__all__ = ["doctor"]

MARKS = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}


Model = Annotated[str | None, typer.Option(help="Model directory, or a name on the hub.")]
ServedName = Annotated[str | None, typer.Option(help="What callers write as `model`.")]
StorageRoot = Annotated[str | None, typer.Option(help="Where datasets are committed.")]
TensorParallel = Annotated[int, typer.Option(help="GPUs per replica.")]
GpuMemory = Annotated[float, typer.Option(help="Share of the GPU's memory.")]
LocalFiles = Annotated[bool, typer.Option(help="The model must be here already.")]
RuntimeMode = Annotated[str, typer.Option(help="What the application runs.")]
CaptureMode = Annotated[str, typer.Option(help="When activations are taken.")]
DashboardUrl = Annotated[str, typer.Option(help="Ray's dashboard.")]
SelfTest = Annotated[
    bool,
    typer.Option("--self-test", help="Load --model and prove that what is captured is right."),
]
Dtype = Annotated[str, typer.Option(help="The engine's dtype, for --self-test.")]
MaxModelLen = Annotated[
    int | None, typer.Option(min=1, help="Longest row in tokens, for --self-test.")
]
Config = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="serve_config.yaml: check the args of its applications as well (in a checkout).",
    ),
]


@reports_errors
def doctor(  # noqa: PLR0913 (the application's own settings)
    *,
    model: Model = None,
    served_model_name: ServedName = None,
    storage_root: StorageRoot = None,
    tensor_parallel_size: TensorParallel = 1,
    gpu_memory_utilization: GpuMemory = 0.9,
    local_files_only: LocalFiles = False,
    runtime_mode: RuntimeMode = "activations",
    capture_mode: CaptureMode = "replay",
    dashboard_url: DashboardUrl = LOCAL_DASHBOARD,
    config: Config = None,
    self_test: SelfTest = False,
    dtype: Dtype = "auto",
    max_model_len: MaxModelLen = None,
    as_json: AsJson = False,
) -> None:
    """Check versions, device, memory, model files, storage and Ray with the given settings.

    Exits with 0 when no check fails, else 2. Nothing is changed, but for a small object that is
    written to the storage root and removed again. With --self-test the model is loaded here and
    what a replica proves before it is ready is proven: each check with what was found, and the
    reproducibility class.
    """
    from wllm_ray.doctor import Settings, run_checks

    checks = run_checks(
        Settings(
            model=model,
            served_model_name=served_model_name,
            storage_root=storage_root,
            tensor_parallel_size=tensor_parallel_size,
            gpu_memory_utilization=gpu_memory_utilization,
            local_files_only=local_files_only,
            runtime_mode=runtime_mode,
            capture_mode=capture_mode,
            dashboard_url=dashboard_url,
            config=config,
            dtype=dtype,
            max_model_len=max_model_len,
            self_test=self_test,
        )
    )
    failed = [check for check in checks if check.status == "fail"]
    if as_json:
        print_json({"ok": not failed, "checks": [check.to_json() for check in checks]})
    else:
        _print(checks)
    if failed:
        raise typer.Exit(FAILED)


def _print(checks: list[Check]) -> None:
    for check in checks:
        typer.echo(f"{MARKS[check.status]}  {check.name}: {check.found}")
        if check.advice:
            typer.echo(f"      → {check.advice}")

"""``wllm verify`` and ``wllm inspect``: what a dataset is, and whether its bytes are right."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from wllm_ray.cli.options import AsJson
from wllm_ray.cli.reporting import FAILED, print_json, reports_errors, say
from wllm_ray.errors import InvalidInputError

__all__ = ["inspect", "verify"]

Root = Annotated[
    str, typer.Argument(help="Storage root; or, alone, the path ROOT/datasets/DATASET_ID.")
]
DatasetId = Annotated[str | None, typer.Argument(help="The dataset's id.")]


@reports_errors
def verify(root: Root, dataset_id: DatasetId = None, *, as_json: AsJson = False) -> None:
    """Check every document and every byte of a dataset, and list all faults."""
    from wllm_ray.dataset.verify import verify_dataset

    report = verify_dataset(*_located(root, dataset_id))
    if as_json:
        print_json(report.to_json())
    else:
        for fault in report.faults:
            typer.echo(f"fault [{fault.code}] {fault.file}: {fault.message}")
        for note in report.notes:
            typer.echo(f"note: {note}")
        state = _counted(len(report.faults), "fault") if report.faults else "no fault"
        files = _counted(report.files, "file")
        typer.echo(f"{report.dataset_id}: {files}, {report.bytes} bytes, {state}")
    if not report.ok:
        if not as_json:
            say(report.advice)
        raise typer.Exit(FAILED)


@reports_errors
def inspect(root: Root, dataset_id: DatasetId = None, *, as_json: AsJson = False) -> None:
    """Show what a dataset holds and where it comes from, from its manifest alone."""
    from wllm_ray.dataset.verify import inspect_dataset

    facts = inspect_dataset(*_located(root, dataset_id))
    if as_json:
        print_json(facts)
    else:
        _print_table(facts)


def _located(root: str, dataset_id: str | None) -> tuple[str, str]:
    """Storage root and id; a dataset's own path says both."""
    from wllm_ray.dataset.layout import split_dataset_path

    found = split_dataset_path(root) if dataset_id is None else (root, dataset_id)
    if found is None:
        raise InvalidInputError(
            f"expected ROOT DATASET_ID, or the path ROOT/datasets/DATASET_ID; found {root!a}",
            code="invalid_argument",
        )
    return found


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _print_table(facts: dict[str, Any]) -> None:
    """Two columns. Lines are never broken: a digest is there to be copied or searched for."""
    width = max(map(len, facts))
    for name, value in facts.items():
        first, *more = _shown(value).split("\n")
        typer.echo(f"{typer.style(name.ljust(width), bold=True)}  {first}")
        for line in more:
            typer.echo(f"{' ' * width}  {line}")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_shown(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_shown, value))
    return "–" if value is None else str(value)

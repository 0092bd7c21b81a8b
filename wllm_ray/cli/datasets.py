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
        state = f"{len(report.faults)} faults" if report.faults else "no fault"
        typer.echo(f"{report.dataset_id}: {report.files} files, {report.bytes} bytes, {state}")
    if not report.ok:
        if not as_json:
            say("the dataset is not what was committed; restore it from a copy, or capture again")
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
    if dataset_id is not None:
        return root, dataset_id
    parent, _, name = root.rstrip("/").rpartition("/")
    base, _, folder = parent.rpartition("/")
    if folder != "datasets" or not name:
        raise InvalidInputError(
            f"expected ROOT DATASET_ID, or the path ROOT/datasets/DATASET_ID; found {root!a}",
            code="invalid_argument",
        )
    return base or ".", name


def _print_table(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, _shown(value))
    Console().print(table, markup=False, highlight=False)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{key}: {_shown(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value))
    return "–" if value is None else str(value)

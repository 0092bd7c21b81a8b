"""``wllm verify`` and ``wllm inspect``: what a dataset is, and whether its bytes are right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from wllm_ray.cli.byte_bar import byte_bar
from wllm_ray.cli.located import DatasetId, Root, located
from wllm_ray.cli.options import AsJson, Quiet
from wllm_ray.cli.reporting import FAILED, counted, print_json, reports_errors, say
from wllm_ray.errors import InvalidInputError

if TYPE_CHECKING:
    from wllm_ray.dataset.reading.verify import VerifyReport

__all__ = ["inspect", "verify"]

DatasetIds = Annotated[list[str] | None, typer.Argument(help="Ids of datasets under ROOT.")]
All = Annotated[bool, typer.Option("--all", help="Every dataset that is committed under ROOT.")]


@reports_errors
def verify(
    root: Root,
    dataset_ids: DatasetIds = None,
    *,
    every: All = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Check every document and every byte of datasets, and list all faults.

    Exit code 2 where there is a fault. With `--json`, one line for each dataset.
    """
    from wllm_ray.dataset.reading.verify import verify_dataset

    sound = True
    for where, dataset_id in _chosen(root, dataset_ids or [], every=every):
        with byte_bar(dataset_id, quiet=quiet) as on_bytes:
            report = verify_dataset(where, dataset_id, on_bytes=on_bytes)
        if as_json:
            print_json(report.to_json())
        else:
            _print_report(report)
        sound = sound and report.ok
    if not sound:
        raise typer.Exit(FAILED)


@reports_errors
def inspect(root: Root, dataset_id: DatasetId = None, *, as_json: AsJson = False) -> None:
    """Show what a dataset holds and where it comes from, from its documents alone.

    Of one that was begun and not committed, it says how much is staged.
    """
    from wllm_ray.dataset.tools.inspect import inspect_dataset

    facts = inspect_dataset(*located(root, dataset_id))
    if as_json:
        print_json(facts)
    else:
        _print_table(facts)


def _chosen(root: str, dataset_ids: list[str], *, every: bool) -> list[tuple[str, str]]:
    """Root and id of each dataset that is to be looked at."""
    from wllm_ray.dataset.reading.files import list_datasets
    from wllm_ray.dataset.stores.store import open_store

    if not every:
        return [(root, one) for one in dataset_ids] or [located(root, None)]
    if dataset_ids:
        raise InvalidInputError(
            f"--all takes no dataset id, found {dataset_ids[0]!a}", code="invalid_argument"
        )
    found = list_datasets(open_store(root))
    if not found:
        raise InvalidInputError(
            f"no dataset is committed under {root!a}; check the root", code="invalid_argument"
        )
    return [(root, one) for one in found]


def _print_report(report: VerifyReport) -> None:
    for fault in report.faults:
        typer.echo(f"fault [{fault.code}] {fault.file}: {fault.message}")
    for note in report.notes:
        typer.echo(f"note: {note}")
    state = counted(len(report.faults), "fault") if report.faults else "no fault"
    typer.echo(
        f"{report.dataset_id}: {counted(report.files, 'file')}, {report.bytes} bytes, {state}"
    )
    if report.advice:
        say(report.advice)


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

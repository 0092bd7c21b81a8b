"""``wllm report``: one HTML page that shows what a dataset is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from wllm_ray.cli.located import DatasetId, Root, located
from wllm_ray.cli.reporting import FAILED, counted, needs_extra, reports_errors, say

__all__ = ["report"]

Output = Annotated[
    Path, typer.Option("--output", "-o", help="The page, a local file; replaced if it exists.")
]
Label = Annotated[
    str | None,
    typer.Option(help="Metadata field that probes predict; `label` where rows have it."),
]
ColorBy = Annotated[
    str | None, typer.Option(help="Metadata field that colours the projection; else the label.")
]
Seed = Annotated[int, typer.Option(min=0, help="Of samples, split and shuffling.")]


@reports_errors
def report(
    root: Root,
    dataset_id: DatasetId = None,
    *,
    output: Output = Path("report.html"),
    label: Label = None,
    color_by: ColorBy = None,
    seed: Seed = 0,
) -> None:
    """Write one self-contained HTML page about a dataset.

    Provenance, verification, failures, norms, massive activations, principal components, and probe
    accuracy by layer where rows have a label. A damaged dataset gets a page, too, which lists the
    faults; the exit code is then 2.
    """
    from rich.console import Console

    from wllm_ray.outputs import local_output
    from wllm_ray.report import make_report
    from wllm_ray.report.page import write_page

    where, page = located(root, dataset_id), local_output(output, "file")
    with needs_extra(), Console(stderr=True).status("opening") as status:
        made = make_report(*where, label=label, color_by=color_by, seed=seed, doing=status.update)
        write_page(page, made.html)
    typer.echo(str(page))
    if not made.verified.ok:
        say(f"{counted(len(made.verified.faults), 'fault')}; {made.verified.advice}")
        raise typer.Exit(FAILED)

"""``wllm export``: a dataset in the format of another tool."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from wllm_ray.cli.located import DatasetId, Root, located
from wllm_ray.cli.reporting import needs_extra, reports_errors

__all__ = ["export"]

To = Annotated[Literal["parquet", "safetensors", "saelens", "hf"], typer.Option(help="The format.")]
Output = Annotated[Path, typer.Option("--output", "-o", help="A new or empty local folder.")]


@reports_errors
def export(root: Root, dataset_id: DatasetId = None, *, to: To, output: Output) -> None:
    """Write the good rows of a dataset in the format of another tool.

    `parquet` and `safetensors`: one file per shard. `saelens`: what SAELens reads as cached
    activations. `hf`: a folder for `datasets.load_dataset`. The source is checked while it is read
    and never changed; the folder appears when it is complete.
    """
    from rich.console import Console

    from wllm_ray.export import export_dataset

    where = located(root, dataset_id)
    with needs_extra(), Console(stderr=True).status("writing"):
        folder = export_dataset(*where, to, output)
    typer.echo(str(folder))

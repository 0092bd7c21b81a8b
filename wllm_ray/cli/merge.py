"""``wllm merge``: one dataset of several."""

from __future__ import annotations

from typing import Annotated

import typer

from wllm_ray.cli.byte_bar import byte_bar
from wllm_ray.cli.options import AsJson, Quiet
from wllm_ray.cli.reporting import counted, print_json, reports_errors

__all__ = ["merge"]

Root = Annotated[str, typer.Argument(help="Storage root of the datasets.")]
Sources = Annotated[list[str], typer.Argument(help="Their ids, in the order of their rows.")]
Into = Annotated[str, typer.Option(help="Id of the new dataset.")]
ToRoot = Annotated[str | None, typer.Option(help="Its storage root. Default: the same.")]
Mixed = Annotated[
    bool,
    typer.Option(
        "--mixed-fingerprints",
        help="Join what engines captured that may differ numerically; recorded per shard.",
    ),
]


@reports_errors
def merge(
    root: Root,
    sources: Sources,
    *,
    into: Into,
    to_root: ToRoot = None,
    mixed_fingerprints: Mixed = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Make one dataset of several that were asked for the same, with the rows of all.

    The sources are verified while they are read, and stay. Run the same command again to go on
    after an interruption.
    """
    from wllm_ray.dataset.stores.store import expect_lasting
    from wllm_ray.dataset.tools.merge import merge_datasets

    expect_lasting(to_root or root)
    with byte_bar(into, quiet=quiet) as on_bytes:
        made = merge_datasets(
            root,
            sources,
            into,
            to_root=to_root,
            mixed_fingerprints=mixed_fingerprints,
            on_bytes=on_bytes,
        )
    facts = {
        "dataset_id": made.dataset_id,
        "rows": made.rows,
        "rows_failed": made.rows_failed,
        "shards": len(made.shards),
        "bytes": made.bytes,
        "content_sha256": made.content_sha256,
        "manifest_sha256": made.manifest_sha256,
    }
    if as_json:
        print_json(facts)
    else:
        typer.echo(
            f"{made.dataset_id}: {counted(made.rows, 'row')} in "
            f"{counted(len(made.shards), 'shard')}, {made.bytes} bytes, committed"
        )

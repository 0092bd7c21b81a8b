"""``wllm gc``: find what dead attempts left behind, and remove it on request."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Annotated

import typer

from wllm_ray.cli.located import DatasetId, Root, located
from wllm_ray.cli.options import AsJson
from wllm_ray.cli.reporting import FAILED, counted, print_json, reports_errors

if TYPE_CHECKING:
    from wllm_ray.dataset.tools.gc import GcReport, Leftover

__all__ = ["gc"]

Delete = Annotated[bool, typer.Option("--delete", help="Remove what is listed.")]
# A hundred years and more; an age of much more begins before the first date that Python knows.
LONGEST_H = 1_000_000

OlderThan = Annotated[
    float,
    typer.Option(
        min=0,
        max=LONGEST_H,
        help="Hours; younger files are left, a writer may be at work.",
    ),
]
Abandon = Annotated[
    bool,
    typer.Option("--abandon", help="Give up this dataset, which was begun and never committed."),
]


@reports_errors
def gc(
    root: Root,
    dataset_id: DatasetId = None,
    *,
    delete: Delete = False,
    older_than: OlderThan = 24.0,
    abandon: Abandon = False,
    as_json: AsJson = False,
) -> None:
    """List files that no record names, and with `--delete` remove them.

    What a spec, receipt or manifest names is never touched, nor is a dataset that is damaged (exit
    code 2) or a file of a shard that is not staged yet. Datasets that were begun and not committed
    are listed; they resume when their job is run again.
    """
    from wllm_ray.dataset.format.layout import split_dataset_path
    from wllm_ray.dataset.stores.store import root_text
    from wllm_ray.dataset.tools.gc import collect_garbage, expect_root

    age = timedelta(hours=older_than)
    if abandon:
        _abandon(*located(root, dataset_id), delete=delete, age=age, as_json=as_json)
        return
    where = (root, dataset_id)
    if dataset_id is None:
        root_text(root)  # refuses what may hold a secret, which a message would repeat
        where = split_dataset_path(root) or where
    reports = []
    for report in collect_garbage(*where, delete=delete, older_than=age):
        reports.append(report)
        if not as_json:
            _print_report(report, delete=delete)
    if not reports:
        expect_root(root)
    gone = [one for report in reports for one in report.leftovers if one.removable]
    _print_total([(one.key, one.bytes) for one in gone], reports, delete=delete, as_json=as_json)
    if any(report.damage for report in reports):
        raise typer.Exit(FAILED)


def _abandon(root: str, dataset_id: str, *, delete: bool, age: timedelta, as_json: bool) -> None:
    from wllm_ray.dataset.tools.abandon import abandon_dataset

    files = abandon_dataset(root, dataset_id, delete=delete, older_than=age)
    if not as_json:
        for key, size in files:
            typer.echo(f"{'removed' if delete else 'removable'}: {key}, {size} bytes")
    _print_total(files, [], delete=delete, as_json=as_json)


def _print_report(report: GcReport, *, delete: bool) -> None:
    if report.damage:
        typer.echo(
            f"damaged: {report.dataset_id} [{report.damage.code}]: {report.damage.message}; "
            f"nothing of it was removed"
        )
    for one in report.leftovers:
        typer.echo(f"{_fate(one, delete=delete)}: {one.key}, {one.bytes} bytes, {one.kind}")
    if report.state == "begun":
        shards = counted(report.shards, "shard")
        typer.echo(
            f"begun: {report.dataset_id}, {report.staged} of {shards} staged, {report.bytes} bytes"
            f"; run its job or merge again to finish it, or give it up with --abandon"
        )

    if report.state == "abandoned":
        typer.echo(
            f"given up: {report.dataset_id}; its id is kept from use until it is given up once "
            f"more (--abandon --delete), when no writer of it is left"
        )


def _fate(one: Leftover, *, delete: bool) -> str:
    if one.kind == "foreign":
        return "left, not of wllm"
    if one.recent:
        return "left, too recent"
    return "removed" if delete else "removable"


def _print_total(
    files: list[tuple[str, int]], reports: list[GcReport], *, delete: bool, as_json: bool
) -> None:
    size = sum(size for _, size in files)
    if as_json:
        datasets = [report.to_json() for report in reports]
        total = {"files": len(files), "bytes": size, "deleted": delete}
        print_json(total | {"datasets": datasets})
        return
    what = f"{counted(len(files), 'file')}, {size} bytes"
    hint = "" if delete or not files else "; add --delete to remove them"
    typer.echo(f"{what} {'removed' if delete else 'can be removed'}{hint}")

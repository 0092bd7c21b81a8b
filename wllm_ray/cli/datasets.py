"""``wllm verify`` and ``wllm inspect``: what a dataset is, and whether its bytes are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wllm_ray.cli.byte_bar import byte_bar
from wllm_ray.cli.located import DatasetId, Root, located
from wllm_ray.cli.options import AsJson, Quiet
from wllm_ray.cli.reporting import (
    FAILED,
    counted,
    print_json,
    printable,
    reports_errors,
    say,
    say_error,
)
from wllm_ray.errors import InvalidInputError, NotFoundError, StorageError

if TYPE_CHECKING:
    from wllm_ray.dataset.reading.verify import VerifyReport

__all__ = ["inspect", "verify"]

DatasetIds = Annotated[list[str] | None, typer.Argument(help="Ids of datasets under ROOT.")]
All = Annotated[bool, typer.Option("--all", help="Every dataset that is committed under ROOT.")]
# A longer list is cut to the first few of it.
LONGEST_LIST, FIRST_FEW = 20, 6
ABOUT_NOTES = "`wllm gc` says which of the files without a record can go; --delete removes those"


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

    Exit code 2 where there is a fault, or a dataset is not there or cannot be read. With `--json`,
    one line for each dataset.
    """
    from wllm_ray.dataset.reading.verify import verify_dataset

    found = _Verified(as_json=as_json)
    chosen = _chosen(root, dataset_ids or [], every=every)
    for where, dataset_id in chosen:
        try:
            with byte_bar(dataset_id, quiet=quiet) as on_bytes:
                report = verify_dataset(where, dataset_id, on_bytes=on_bytes)
        except (NotFoundError, StorageError) as error:
            found.add_unread(dataset_id, error)
        else:
            found.add(report)
    if not as_json:
        found.print_end(len(chosen))
    if not found.all_good:
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
    from wllm_ray.dataset.format.layout import check_dataset_id
    from wllm_ray.dataset.reading.files import list_datasets
    from wllm_ray.dataset.stores.store import open_store

    if not every and not dataset_ids:
        return [located(root, None, instead=", or --all for every dataset under ROOT")]
    if not every:
        for one in dataset_ids:
            check_dataset_id(one)
        return [(root, one) for one in dataset_ids]
    if dataset_ids:
        raise InvalidInputError(
            f"--all takes no dataset id, found {dataset_ids[0]!a}", code="invalid_argument"
        )
    found = list_datasets(open_store(root))
    if not found:
        raise _none_committed(root)
    return [(root, one) for one in found]


def _none_committed(root: str) -> InvalidInputError:
    from wllm_ray.dataset.stores.store import open_store
    from wllm_ray.dataset.tools.folders import dataset_ids

    begun = dataset_ids(open_store(root))
    listed = ", ".join(begun[:FIRST_FEW]) + (" …" if len(begun) > FIRST_FEW else "")
    advice = (
        f"begun there: {listed}; `wllm gc` says how far they are" if begun else "check the root"
    )
    return InvalidInputError(
        f"no dataset is committed under {root!a}; {advice}", code="invalid_argument"
    )


@dataclass(slots=True)
class _Verified:
    """What was found in dataset after dataset, told as it comes.

    Attributes:
        as_json: Tell it to programs.
        faulty: Ids of those with a fault.
        missing: Ids of those that are not committed.
        unreadable: Ids of those that the storage root did not give.
        advice: What to do, each once, in the order found.
    """

    as_json: bool
    faulty: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    advice: dict[str, None] = field(default_factory=dict)

    @property
    def all_good(self) -> bool:
        """Whether all are there, and without a fault."""
        return not (self.faulty or self.missing or self.unreadable)

    def add(self, report: VerifyReport) -> None:
        """Tell of a dataset that is committed."""
        if report.faults:
            self.faulty.append(report.dataset_id)
            self.advice[report.advice] = None
        if report.notes:
            self.advice[ABOUT_NOTES] = None
        if self.as_json:
            print_json(report.to_json())
        else:
            _print_report(report)

    def add_unread(self, dataset_id: str, error: NotFoundError | StorageError) -> None:
        """Tell of one that is not, or that cannot be read."""
        which = self.missing if isinstance(error, NotFoundError) else self.unreadable
        which.append(dataset_id)
        say_error(error)
        if self.as_json:
            print_json({"dataset_id": dataset_id, "ok": False, **error.to_json()})

    def print_end(self, count: int) -> None:
        """Sum up, where there were several, and say what to do."""
        if count > 1:
            typer.echo(self._total(count))
        for advice in self.advice:
            say(advice)

    def _total(self, count: int) -> str:
        """For example ``2 of 16 datasets have faults: a, b``."""
        told = []
        for ids, one, more in (
            (self.faulty, "has faults", "have faults"),
            (self.missing, "is not committed", "are not committed"),
            (self.unreadable, "cannot be read", "cannot be read"),
        ):
            if ids:
                said = one if len(ids) == 1 else more
                told.append(f"{len(ids)} of {count} datasets {said}: {', '.join(ids)}")
        return "; ".join(told) or f"no fault in {count} datasets"


def _print_report(report: VerifyReport) -> None:
    state = counted(len(report.faults), "fault") if report.faults else "no fault"
    typer.echo(
        f"{report.dataset_id}: {counted(report.files, 'file')}, {report.bytes} bytes, {state}"
    )
    for fault in report.faults:
        typer.echo(printable(f"  fault [{fault.code}] {fault.file}: {fault.message}"))
    for note in report.notes:
        typer.echo(printable(f"  note: {note}"))


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
        return "\n".join(f"{printable(key)}: {_shown(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)) and value:
        return ", ".join(map(_shown, _first_few(value)))
    return "–" if value in (None, [], ()) else printable(str(value))


def _first_few(values: Sequence[Any]) -> Sequence[Any]:
    if len(values) <= LONGEST_LIST:
        return values
    return [*values[:FIRST_FEW], f"… ({len(values)} in all; --json lists them)"]

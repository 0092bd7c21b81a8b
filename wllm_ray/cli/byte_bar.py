"""A progress bar over bytes, on stderr."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from wllm_ray.cli.reporting import printable

__all__ = ["byte_bar"]


@contextmanager
def byte_bar(label: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar while the context lasts; yields what it is told with: bytes done, of how many.

    Results are printed after it: what is written meanwhile stands behind the bar.
    """
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    # A bar that goes again needs a terminal that can move its cursor, and nothing else is one
    # because of an environment variable (FORCE_COLOR makes the console take a file for one).
    able = sys.stderr.isatty() and console.is_terminal and not console.is_dumb_terminal
    disable = quiet or not able
    with Progress(*columns, console=console, transient=True, disable=disable) as bar:
        task = bar.add_task(printable(label), total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

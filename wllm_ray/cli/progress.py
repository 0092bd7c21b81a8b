"""A progress bar over rows, on stderr."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar

from wllm_ray.dataset.format.manifest import DatasetSpec, Receipt
from wllm_ray.job.progress import RowCount
from wllm_ray.records import Chunk

__all__ = ["ProgressBar"]


class ProgressBar(RowCount):
    """Shows rows captured, of all rows; a context manager."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__()
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            disable=quiet,
        )
        self._task = self._bar.add_task("checking the input", total=None)
        # Only a bar that has counted rows stays on the screen.
        self._bar.live.transient = True

    def planned(self, spec: DatasetSpec, receipts: Mapping[int, Receipt]) -> None:
        """Show the total, and what was written before."""
        super().planned(spec, receipts)
        self._bar.live.transient = False
        self._bar.update(self._task, description="rows", total=self.total, completed=self.done)

    def captured(self, chunk: Chunk) -> None:
        """Show that a chunk is captured."""
        super().captured(chunk)
        self._bar.update(self._task, completed=self.done)

    def staged(self, receipt: Receipt) -> None:
        """Show that a shard is written."""
        super().staged(receipt)
        self._bar.update(self._task, completed=self.done)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()

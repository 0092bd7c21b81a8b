"""A progress bar over rows, on stderr."""

from __future__ import annotations

from collections import Counter
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

from wllm_ray.client.job import Progress
from wllm_ray.dataset.manifest import DatasetSpec
from wllm_ray.records import Chunk

__all__ = ["ProgressBar"]


class ProgressBar(Progress):
    """Shows rows captured, of all rows; a context manager."""

    def __init__(self, *, quiet: bool) -> None:
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
        self._captured: Counter[int] = Counter()
        self._spec: DatasetSpec | None = None

    def planned(self, spec: DatasetSpec, rows_done: int) -> None:
        """Show the total, and what was written before."""
        self._spec = spec
        self._bar.update(self._task, description="rows", total=spec.rows, completed=rows_done)

    def captured(self, chunk: Chunk) -> None:
        """Count a chunk; rows that are tried again count once."""
        assert self._spec is not None, "captured before it was planned"
        room = self._spec.shards[chunk.shard].rows - self._captured[chunk.shard]
        rows = min(len(chunk.rows), room)
        self._captured[chunk.shard] += rows
        self._bar.advance(self._task, rows)

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

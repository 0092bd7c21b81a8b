"""How the rows of a job fall into shards, as its spec says.

Rows are in memory, or are read from a source more than once, one shard at a time: from a file that
does not fit into memory, for example. Its first pass makes the spec, the second reads the shards
that are missing.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from wllm_ray.dataset.format.manifest import DatasetSpec
from wllm_ray.dataset.writing.spec import build_spec
from wllm_ray.memory import collector_paused
from wllm_ray.plan import Shard, ShardLimits
from wllm_ray.records import InputRow, RowRecord
from wllm_ray.requests import Selection, Served, traced
from wllm_ray.schema import StorageOptions
from wllm_ray.tokens import make_records, outlines

__all__ = [
    "NamedRows",
    "RowSource",
    "SourcePlan",
    "ToRecords",
    "read_shards",
    "rows_of_shard",
    "shards_of",
    "spec_of",
]

RowSource: TypeAlias = Callable[[], Iterable[InputRow]]
# The rows of one shard and the index of the first → their records.
ToRecords: TypeAlias = Callable[[Sequence[InputRow], int], Sequence[RowRecord]]


@dataclass(frozen=True, slots=True)
class SourcePlan:
    """What is asked of the rows of a source.

    Attributes:
        served: The model.
        selection: What is captured of every row.
        rows: Called for each pass over the input; yields rows that have been checked.
        dataset_id: The id, or None for one made from everything that is asked.
        limits: Upper bounds of one shard, where ``storage`` says nothing else.
        storage: How the dataset is stored.
    """

    served: Served
    selection: Selection
    rows: RowSource
    dataset_id: str | None
    limits: ShardLimits = field(default_factory=ShardLimits)
    storage: StorageOptions = field(default_factory=StorageOptions)

    @property
    def captured(self) -> Selection:
        """What is captured: with traces more than what is asked."""
        return traced(self.served, self.selection) if self.storage.full_trace else self.selection


def spec_of(plan: SourcePlan) -> DatasetSpec:
    """Read the source once and say what is asked."""
    identity = plan.selection.identity
    return build_spec(
        plan.served,
        identity,
        outlines(plan.rows(), identity),
        site_widths=plan.selection.site_widths,
        dataset_id=plan.dataset_id,
        limits=plan.limits,
        storage=plan.storage,
    )


def rows_of_shard(
    rows: Sequence[RowRecord], spec: DatasetSpec, number: int
) -> tuple[RowRecord, ...]:
    """The rows of a shard, of all rows in memory; none where the spec has no such shard."""
    if number >= len(spec.shards):
        return ()
    shard = spec.shards[number]
    return tuple(rows[shard.first_row : shard.first_row + shard.rows])


def shards_of(
    rows: Sequence[RowRecord], spec: DatasetSpec, done: Container[int] = ()
) -> Iterator[Shard]:
    """The shards that are not done, of all rows in memory."""
    for number in range(len(spec.shards)):
        if number not in done:
            yield Shard(number, rows_of_shard(rows, spec, number))


def read_shards(
    rows: RowSource, spec: DatasetSpec, to_records: ToRecords, done: Container[int] = ()
) -> Iterator[Shard]:
    """The shards that are not done, read from the source one at a time."""
    source = iter(rows())
    for number, asked in enumerate(spec.shards):
        batch = islice(source, asked.rows)
        if number in done:
            for _ in batch:
                pass
        else:
            with collector_paused():  # everything made here is kept, and there is much of it
                shard = Shard(number, tuple(to_records(list(batch), asked.first_row)))
            yield shard


class NamedRows:
    """Shard number → its rows without token ids; asked in ascending order, reads the source once.

    Args:
        plan: Whose rows.
        spec: How they fall into shards.
    """

    def __init__(self, plan: SourcePlan, spec: DatasetSpec) -> None:
        self._plan, self._spec = plan, spec
        self._shards: Iterator[Shard] | None = None

    def __call__(self, number: int) -> Sequence[RowRecord]:
        """The rows of a shard; none where there is no such shard."""
        self._shards = self._shards or read_shards(self._plan.rows, self._spec, self._named)
        return next((shard.rows for shard in self._shards if shard.index == number), ())

    def _named(self, rows: Sequence[InputRow], first_index: int) -> list[RowRecord]:
        identity = self._plan.selection.identity
        return list(make_records(rows, identity, first_index))

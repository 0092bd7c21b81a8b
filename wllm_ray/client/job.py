"""A dataset written where this code runs, from activations captured over HTTP.

``build_spec → create_spec → staged_shards → capture → stage_shard → commit_manifest``: the
command line does this into a folder, the client into memory. Rows are read from their source
twice, so a source may be a file that does not fit into memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, TypeAlias

from wllm_ray.client.connection import Connection
from wllm_ray.client.remote import Answer, Remote, as_served, sent_row
from wllm_ray.coordinator import Coordinator, FlowLimits
from wllm_ray.dataset.layout import folder
from wllm_ray.dataset.manifest import DatasetSpec, Manifest, Receipt
from wllm_ray.dataset.shard import ROWS_SCHEMA, decode_rows, read_failure
from wllm_ray.dataset.spec import build_spec
from wllm_ray.dataset.store import Store
from wllm_ray.dataset.writer import (
    StageResult,
    commit_manifest,
    create_spec,
    stage_shard,
    staged_shards,
)
from wllm_ray.errors import ConflictError
from wllm_ray.plan import Shard, ShardLimits
from wllm_ray.records import Chunk, InputRow, RowFailure, RowRecord
from wllm_ray.requests import Selection
from wllm_ray.schema import ExtractionSchema, ModelCard

__all__ = ["JobOutcome", "JobPlan", "Progress", "RowSource", "permanent_failures", "run_job"]

RowSource: TypeAlias = Callable[[], Iterable[InputRow]]


class Progress:
    """Hears how far a job is; this one says nothing."""

    def planned(self, spec: DatasetSpec, rows_done: int) -> None:
        """The input is checked, and so many of its rows were written before."""

    def captured(self, chunk: Chunk) -> None:
        """A chunk is captured; again where rows are retried."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """What a job is to do.

    Attributes:
        card: The served model.
        selection: What is captured of every row.
        rows: Called for each pass over the input; yields rows that have been checked.
        dataset_id: The id, or None for one made from everything that is asked.
        shard_limits: Upper bounds of one shard.
        batch_size: Rows per chunk.
        resume: Go on with what is there; otherwise anything there is an error.
        flow: Window and retries. The connection repeats requests itself, so a chunk has one
            attempt here.
    """

    card: ModelCard
    selection: Selection
    rows: RowSource
    dataset_id: str | None
    shard_limits: ShardLimits = field(default_factory=ShardLimits)
    batch_size: int | Literal["auto"] = "auto"
    resume: bool = True
    flow: FlowLimits = field(default_factory=lambda: FlowLimits(attempts=1))


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """What came of it.

    Attributes:
        spec: What was asked.
        manifest: The committed dataset, or None where transient failures are left.
        receipts: Shard number → receipt, for all shards that are written.
        resumed: How many of them were there before.
        transient: Row index → failure that may pass.
    """

    spec: DatasetSpec
    manifest: Manifest | None
    receipts: Mapping[int, Receipt]
    resumed: int
    transient: Mapping[int, RowFailure]


async def run_job(
    connection: Connection, store: Store, plan: JobPlan, progress: Progress | None = None
) -> JobOutcome:
    """Write the dataset, or what can be written of it.

    Raises:
        ConflictError: The id stands for something else, or ``resume`` is off and it is taken.
        UnavailableError: Nobody answers; what is staged stays.
        WLLMError: The application refused, or storage failed; what is staged stays.
    """
    spec = await asyncio.to_thread(_spec, plan)
    job = _Job(connection, store, plan, spec, progress or Progress())
    resumed = await asyncio.to_thread(job.begin)
    transient: Mapping[int, RowFailure] = {}
    if len(job.receipts) < len(spec.shards):
        transient = await job.capture_missing()
    manifest = None
    if not transient:
        manifest = await asyncio.to_thread(commit_manifest, store, spec.dataset_id)
    return JobOutcome(spec, manifest, job.receipts, resumed, transient)


class _Job:
    """One run; ``receipts`` grows as shards are written."""

    def __init__(
        self,
        connection: Connection,
        store: Store,
        plan: JobPlan,
        spec: DatasetSpec,
        progress: Progress,
    ) -> None:
        self._connection, self._store, self._plan = connection, store, plan
        self._spec, self._progress = spec, progress
        self.receipts: dict[int, Receipt] = {}

    def begin(self) -> int:
        """Write the spec, find what is there already, and say how many shards that is."""
        if not self._plan.resume:
            _expect_nothing(self._store, self._spec.dataset_id)
        create_spec(self._store, self._spec, rows_of=_RowsOf(self._plan, self._spec))
        self.receipts = staged_shards(self._store, self._spec)
        self._progress.planned(self._spec, sum(one.rows for one in self.receipts.values()))
        return len(self.receipts)

    async def capture_missing(self) -> Mapping[int, RowFailure]:
        """Capture and stage the shards without receipt; returns what may be retried."""
        schema = await self._connection.get("/v1/extraction-schema", ExtractionSchema)
        remote = Remote(self._connection, self._plan.card, self._plan.selection, schema)
        coordinator = Coordinator(
            # Which replica runs a chunk, and whether alone, is the server's business.
            lambda chunk, _alone: remote.capture(chunk),
            self._stage,
            limits=self._plan.flow,
            on_chunk=self._progress.captured,
        )
        shards = _shards(self._plan, self._spec, self.receipts)
        return (await coordinator.run(shards, self._plan.batch_size)).transient

    async def _stage(self, shard: Shard, payloads: Sequence[list[Answer]]) -> StageResult:
        answers = [answer for payload in payloads for answer in payload]
        records, chunks = as_served(shard.rows, answers, self._plan.card)
        result = await asyncio.to_thread(
            stage_shard, self._store, self._spec, shard.index, records, chunks
        )
        if result.receipt is not None:
            self.receipts[shard.index] = result.receipt
        return result


def permanent_failures(
    store: Store, dataset_id: str, receipts: Mapping[int, Receipt]
) -> Iterator[tuple[int, str, RowFailure]]:
    """(row index, id, failure) of every failed row of the shards that are written."""
    for _, receipt in sorted(receipts.items()):
        if receipt.rows_failed:
            name = receipt.file("rows").name
            table = decode_rows(store.get(f"{folder(dataset_id)}/{name}"), name)
            columns = (
                table.column(ROWS_SCHEMA.get_field_index(one)).to_pylist()
                for one in ("row", "id", "failure")
            )
            for index, row_id, text in zip(*columns, strict=True):
                if text is not None:
                    yield index, row_id, read_failure(text)


def _spec(plan: JobPlan) -> DatasetSpec:
    identity = plan.selection.identity
    digests = (sent_row(0, row, identity).request_digest for row in plan.rows())
    return build_spec(
        plan.card, identity, digests, dataset_id=plan.dataset_id, limits=plan.shard_limits
    )


def _expect_nothing(store: Store, dataset_id: str) -> None:
    if store.list(folder(dataset_id)):
        raise ConflictError(
            f"dataset {dataset_id!r} was begun already under {store.uri}; leave out --no-resume to "
            f"go on with it, or choose another dataset id",
            stage="create_spec",
        )


def _shards(plan: JobPlan, spec: DatasetSpec, done: Iterable[int]) -> Iterator[Shard]:
    """The shards that are not done, read from the source one at a time."""
    skipped = frozenset(done)
    source = iter(plan.rows())
    for number, asked in enumerate(spec.shards):
        rows = islice(source, asked.rows)
        if number in skipped:
            for _ in rows:
                pass
        else:
            identity = plan.selection.identity
            numbered = enumerate(rows, start=asked.first_row)
            yield Shard(number, tuple(sent_row(index, row, identity) for index, row in numbered))


class _RowsOf:
    """Shard number → its rows; asked in ascending order, this reads the source once."""

    def __init__(self, plan: JobPlan, spec: DatasetSpec) -> None:
        self._plan, self._spec = plan, spec
        self._shards: Iterator[Shard] | None = None

    def __call__(self, number: int) -> Sequence[RowRecord]:
        self._shards = self._shards or _shards(self._plan, self._spec, ())
        return next((shard.rows for shard in self._shards if shard.index == number), ())

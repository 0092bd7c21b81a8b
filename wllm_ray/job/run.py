"""Runs one job: ``create_spec → staged_shards → capture → stage_shard → commit_manifest``.

What captures a chunk, stages a shard and commits are callables, so the same job runs over HTTP into
a folder, and over Ray's object store into tasks. Resuming is the rule: only shards without receipt
are captured.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from wllm_ray.coordinator import Coordinator, FlowLimits, JobReport
from wllm_ray.dataset.format.layout import folder, manifest_key
from wllm_ray.dataset.format.manifest import DatasetSpec, Manifest, Receipt
from wllm_ray.dataset.stores.store import Store
from wllm_ray.dataset.writing.conflict import RowsOf
from wllm_ray.dataset.writing.writer import StageResult, create_spec, staged_shards
from wllm_ray.errors import ConflictError
from wllm_ray.job.progress import Progress
from wllm_ray.plan import Shard
from wllm_ray.records import Chunk, RowFailure

__all__ = ["Job", "JobOutcome", "RunOptions", "run_job"]

Payload = TypeVar("Payload")

_LISTED = 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How a job is run; none of it leaves a trace in the dataset.

    Attributes:
        batch_size: Rows per chunk, or ``auto``.
        resume: Go on with what is there; otherwise anything there is an error.
        flow: Window, deadlines and retries.
    """

    batch_size: int | Literal["auto"] = "auto"
    resume: bool = True
    flow: FlowLimits = field(default_factory=FlowLimits)


@dataclass(frozen=True, slots=True)
class Job(Generic[Payload]):
    """What is to be done, and by whom.

    Attributes:
        spec: What is asked.
        shards: Numbers of shards that are done → the others, each read only when it is wanted.
        rows_of: Shard number → its rows, so that a conflict can name those that differ.
        capture: Runs a chunk, alone on its replica where the second argument says so.
        stage: Writes one shard from what was captured for it.
        commit: Creates the manifest of a dataset id.
        isolates: Whether ``capture`` honours its second argument.
        options: How it is run.
    """

    spec: DatasetSpec
    shards: Callable[[Container[int]], Iterator[Shard]]
    rows_of: RowsOf
    capture: Callable[[Chunk, bool], Awaitable[Payload]]
    stage: Callable[[DatasetSpec, Shard, Sequence[Payload]], Awaitable[StageResult]]
    commit: Callable[[str], Awaitable[Manifest]]
    isolates: bool = False
    options: RunOptions = field(default_factory=RunOptions)


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """What came of it.

    Attributes:
        spec: What was asked.
        manifest: The committed dataset, or None where transient failures are left.
        receipts: Shard number → receipt, for all shards that are written.
        resumed: How many of them were there before.
        transient: Row index → failure that may pass.
        superseded: Numbers of the shards that this run captured and that another attempt had
            written by then, with other numbers; the first receipt counts.
    """

    spec: DatasetSpec
    manifest: Manifest | None
    receipts: Mapping[int, Receipt]
    resumed: int
    transient: Mapping[int, RowFailure]
    superseded: Sequence[int] = ()


async def run_job(store: Store, job: Job[Payload], progress: Progress | None = None) -> JobOutcome:
    """Write the dataset, or what can be written of it.

    Args:
        store: The storage root that ``job.stage`` and ``job.commit`` write to.
        job: What is to be done.
        progress: Hears how far it is.

    Raises:
        ConflictError: The id stands for something else, or ``resume`` is off and it is taken.
        UnavailableError: Nobody answers; what is staged stays.
        WLLMError: A failure that another attempt would not mend; what is staged stays.
    """
    heard = progress or Progress()
    receipts = await asyncio.to_thread(_begin, store, job)
    resumed = len(receipts)
    heard.planned(job.spec, receipts)
    report = JobReport()
    if resumed < len(job.spec.shards):
        try:
            await _capture_missing(job, receipts, heard, report)
        finally:
            _warn_of_superseded(job.spec.dataset_id, report.superseded)
    manifest = None if report.transient else await job.commit(job.spec.dataset_id)
    superseded = sorted(report.superseded)
    return JobOutcome(job.spec, manifest, receipts, resumed, report.transient, superseded)


def _begin(store: Store, job: Job[Payload]) -> dict[int, Receipt]:
    """Write the spec and find what is there already."""
    if not job.options.resume:
        _expect_nothing(store, job.spec.dataset_id)
    create_spec(store, job.spec, rows_of=job.rows_of)
    return staged_shards(store, job.spec)


def _expect_nothing(store: Store, dataset_id: str) -> None:
    there = {key for key, _ in store.list(folder(dataset_id))}
    if not there:
        return
    if manifest_key(dataset_id) in there:
        state, use = "is committed already", "get it again, without capturing anything"
    else:
        state, use = "was begun already", "go on with it"
    raise ConflictError(
        f"dataset {dataset_id!r} {state} under {store.uri}; leave out --no-resume to {use}, or "
        f"choose another dataset id",
        stage="create_spec",
    )


async def _capture_missing(
    job: Job[Payload], receipts: dict[int, Receipt], progress: Progress, report: JobReport
) -> None:
    """Capture and stage the shards without receipt."""

    async def stage(shard: Shard, payloads: Sequence[Payload]) -> StageResult:
        result = await job.stage(job.spec, shard, payloads)
        if result.receipt is not None:
            receipts[shard.index] = result.receipt
            progress.staged(result.receipt)
        return result

    coordinator = Coordinator(
        job.capture,
        stage,
        limits=job.options.flow,
        isolates=job.isolates,
        on_chunk=progress.captured,
    )
    missing = job.shards(frozenset(receipts))
    await coordinator.run(missing, job.options.batch_size, report)


def _warn_of_superseded(dataset_id: str, shards: Sequence[int]) -> None:
    """Say once what it means that other numbers count than those of this run."""
    if not shards:
        return
    listed = ", ".join(map(str, sorted(shards)[:_LISTED]))
    listed += f" and {len(shards) - _LISTED} more" if len(shards) > _LISTED else ""
    _log.warning(
        "dataset %s: %s %s stood already when this run had captured it: another run or attempt "
        "wrote it first, and what that measured differs from what this run measured. The first "
        "one counts; what this run captured of it is not in the dataset. Rounding is enough for "
        "this in class `tolerance`; in class `bitwise`, look for what differs between the engines",
        dataset_id,
        "shard" if len(shards) == 1 else "each of the shards",
        listed,
    )

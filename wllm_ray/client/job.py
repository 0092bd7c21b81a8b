"""A dataset written where this code runs, from activations captured over HTTP.

The command line does this into a folder, the client into memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from wllm_ray.client.remote import Answer, Remote, as_served
from wllm_ray.dataset.format.manifest import DatasetSpec, Manifest
from wllm_ray.dataset.stores.store import Store
from wllm_ray.dataset.writing.writer import StageResult, commit_manifest, stage_shard
from wllm_ray.job.progress import Progress
from wllm_ray.job.run import Job, JobOutcome, RunOptions, run_job
from wllm_ray.job.source import NamedRows, SourcePlan, read_shards, spec_of
from wllm_ray.plan import Shard
from wllm_ray.records import InputRow, RowRecord
from wllm_ray.tokens import make_records

__all__ = ["run_over_http"]


async def run_over_http(
    remote: Remote,
    store: Store,
    plan: SourcePlan,
    options: RunOptions,
    progress: Progress | None = None,
) -> JobOutcome:
    """Write the dataset, or what can be written of it.

    Args:
        remote: The application. Its connection repeats requests by itself, so a chunk has one
            attempt in ``options.flow``.
        store: Where the dataset is written.
        plan: What is asked.
        options: How it is run.
        progress: Hears how far it is.

    Raises:
        ConflictError: The id stands for something else, or ``resume`` is off and it is taken.
        UnavailableError: Nobody answers; what is staged stays.
        WLLMError: The application refused, or storage failed; what is staged stays.
    """

    def sent(rows: Sequence[InputRow], first_index: int) -> list[RowRecord]:
        records = make_records(rows, plan.selection.identity, first_index)
        return [one._replace(source=row) for one, row in zip(records, rows, strict=True)]

    async def stage(
        spec: DatasetSpec, shard: Shard, payloads: Sequence[list[Answer]]
    ) -> StageResult:
        answers = [answer for payload in payloads for answer in payload]
        records, chunks = as_served(shard.rows, answers, remote.card)
        return await asyncio.to_thread(stage_shard, store, spec, shard.index, records, chunks)

    async def commit(dataset_id: str) -> Manifest:
        return await asyncio.to_thread(commit_manifest, store, dataset_id)

    spec = await asyncio.to_thread(spec_of, plan)
    job = Job(
        spec=spec,
        shards=lambda done: read_shards(plan.rows, spec, sent, done),
        rows_of=NamedRows(plan, spec),
        # Which replica runs a chunk, and whether alone, is the server's business.
        capture=lambda chunk, _alone: remote.capture(chunk),
        stage=stage,
        commit=commit,
        options=options,
    )
    return await run_job(store, job, progress)

"""From rows to calls of a low-level engine, and from there into memory or onto a storage root."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from wllm_ray.answers import rows_failed
from wllm_ray.capture.protocol import Engine
from wllm_ray.concurrency import gather
from wllm_ray.coordinator import FlowLimits
from wllm_ray.dataset.format.manifest import DatasetSpec, Manifest
from wllm_ray.dataset.stores.store import Store
from wllm_ray.dataset.writing.writer import StageResult, commit_manifest, stage_shard
from wllm_ray.engines.auto_batch import Batching
from wllm_ray.engines.stream import ReceiptQueue, Written
from wllm_ray.job.run import Job, RunOptions, run_job
from wllm_ray.job.source import NamedRows, SourcePlan, read_shards
from wllm_ray.plan import Shard
from wllm_ray.records import CapturedChunk, Chunk, InputRow, RowRecord
from wllm_ray.requests import Selection, capture_task
from wllm_ray.tokens import Tokenizer, TokenLimits, make_records, tokenize_rows

__all__ = ["Calls", "write_dataset"]

# One call is prepared or proven while another runs, so that the model never waits.
CALLS_AT_ONCE = 2
# A chunk here is a shard: one begins while the one before it ends, and one is written meanwhile.
# The engine finds out itself when it stands still, and there is no other one to try.
FLOW = FlowLimits(
    chunks_in_flight=2, shards_in_flight=3, chunk_deadline_s=365 * 86_400.0, attempts=1
)


@dataclass(frozen=True, slots=True)
class Calls:
    """Tokenises rows, and captures them call by call.

    Attributes:
        engine: Runs token ids.
        tokenizer: The model's own.
        selection: What is captured of every row.
        batching: How rows are cut into calls.
        window: Bounds the calls that run at once; of the event loop that is running.
    """

    engine: Engine
    tokenizer: Tokenizer
    selection: Selection
    batching: Batching
    window: asyncio.Semaphore

    def tokenize(self, rows: Sequence[InputRow], first_index: int = 0) -> list[RowRecord]:
        """Token ids of rows, or the reason why one cannot be run."""
        served = self.engine.description
        limits = TokenLimits(served.max_model_len, served.vocab_size)
        return tokenize_rows(
            rows, self.tokenizer, self.selection.identity, limits, first_index=first_index
        )

    async def capture(self, rows: Sequence[RowRecord]) -> list[CapturedChunk]:
        """What the engine returns for the rows that can be run, in row order.

        Raises:
            CaptureError: The engine failed; the other calls are cancelled.
        """
        return await gather(map(self._call, self.parts(rows)))

    def parts(self, rows: Sequence[RowRecord]) -> Iterator[Sequence[RowRecord]]:
        """The rows that can be run, cut into calls."""
        runnable = [row for row in rows if row.failure is None]
        return self.batching.plan(runnable, self.selection, CALLS_AT_ONCE)

    async def _call(self, rows: Sequence[RowRecord]) -> CapturedChunk:
        async with self.window:
            return await self.engine.capture_async(capture_task(self.selection, rows))


async def write_dataset(
    calls: Calls, store: Store, plan: SourcePlan, spec: DatasetSpec, receipts: ReceiptQueue
) -> Written:
    """Capture and write what is missing of a dataset, then commit it.

    Args:
        calls: What captures.
        store: The storage root.
        plan: What is asked.
        spec: The same, with its shards.
        receipts: Hears of every shard that is written.

    Raises:
        RowsFailedError: Rows failed for reasons that may pass; what is written stays.
        WLLMError: A failure that another attempt would not mend; what is written stays.
    """

    async def capture(chunk: Chunk, _alone: bool) -> list[CapturedChunk]:  # noqa: FBT001 (a callback)
        return await calls.capture(chunk.rows)

    async def stage(
        spec: DatasetSpec, shard: Shard, payloads: Sequence[list[CapturedChunk]]
    ) -> StageResult:
        chunks = [chunk for payload in payloads for chunk in payload]
        result = await asyncio.to_thread(stage_shard, store, spec, shard.index, shard.rows, chunks)
        if result.receipt is not None:
            await receipts.put(result.receipt)
        return result

    async def commit(dataset_id: str) -> Manifest:
        return await asyncio.to_thread(commit_manifest, store, dataset_id)

    job = Job(
        spec=spec,
        shards=lambda done: read_shards(plan.rows, spec, calls.tokenize, done),
        rows_of=NamedRows(plan, spec),
        capture=capture,
        stage=stage,
        commit=commit,
        # A shard is never more than all rows, so it is one chunk; ``calls`` cuts it.
        options=RunOptions(batch_size=spec.rows, flow=FLOW),
    )
    outcome = await run_job(store, job, receipts)
    if outcome.manifest is None:
        identity = plan.selection.identity
        records = list(make_records(plan.rows(), identity))
        raise rows_failed(records, outcome.transient)
    return Written(outcome.manifest, outcome.superseded)

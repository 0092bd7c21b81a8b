"""``python -m tests.bench.pipeline_worker WAY WIDTH ROWS_FILE ROOT``: one run, told as JSON.

A process of its own, so that its peak memory is that of this run alone.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench.block_engine import DATASET, SITE, BlockEngine, ByteTokenizer, plan_of
from wllm_ray.dataset.format.manifest import DatasetSpec, Manifest
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.dataset.writing.writer import StageResult, commit_manifest, stage_shard
from wllm_ray.engines.base import ActivationEngine
from wllm_ray.job.rows_file import RowsFile
from wllm_ray.job.run import Job, run_job
from wllm_ray.job.source import NamedRows, read_shards, spec_of
from wllm_ray.plan import Shard
from wllm_ray.records import CapturedChunk, Chunk, InputRow, RowRecord
from wllm_ray.requests import capture_task
from wllm_ray.tokens import TokenLimits, tokenize_rows


def run_as_job(engine: BlockEngine, rows: Path, root: Path) -> Manifest:
    """As a job driver does it: chunks to replicas, shards to tasks; here to functions."""
    plan, store = plan_of(engine.description, rows), open_store(root)
    selection, tokenizer = plan.selection, ByteTokenizer()
    limits = TokenLimits(engine.description.max_model_len, engine.description.vocab_size)
    spec = spec_of(plan)

    def tokenized(batch: Sequence[InputRow], first: int) -> list[RowRecord]:
        return tokenize_rows(batch, tokenizer, selection.identity, limits, first_index=first)

    async def capture(chunk: Chunk, _alone: bool) -> CapturedChunk:
        return engine.capture(capture_task(selection, chunk.rows))

    async def stage(
        spec: DatasetSpec, shard: Shard, chunks: Sequence[CapturedChunk]
    ) -> StageResult:
        return await asyncio.to_thread(stage_shard, store, spec, shard.index, shard.rows, chunks)

    async def commit(dataset_id: str) -> Manifest:
        return await asyncio.to_thread(commit_manifest, store, dataset_id)

    job = Job(
        spec=spec,
        shards=lambda done: read_shards(plan.rows, spec, tokenized, done),
        rows_of=NamedRows(plan, spec),
        capture=capture,
        stage=stage,
        commit=commit,
    )
    manifest = asyncio.run(run_job(store, job)).manifest
    assert manifest is not None, "no row can fail here"
    return manifest


def run_in_process(engine: BlockEngine, rows: Path, root: Path) -> Manifest:
    with ActivationEngine(lambda: (engine, ByteTokenizer()), SITE) as library:
        stream = library.stream_to_disk(RowsFile(rows), root, DATASET)
        for _ in stream:
            pass
    assert stream.manifest is not None, "no row can fail here"
    return stream.manifest


WAYS = {"run_job": run_as_job, "stream_to_disk": run_in_process}


def peak_memory() -> int:
    """Bytes. Not ``ru_maxrss``, which begins with that of the parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def main(way: str, width: str, rows: str, root: str) -> None:
    engine = BlockEngine(int(width))
    began, worked = time.perf_counter(), time.process_time()
    manifest = WAYS[way](engine, Path(rows), Path(root))
    found = {
        "rows": manifest.rows_ok,
        "seconds": time.perf_counter() - began,
        "processor_seconds": time.process_time() - worked,
        "peak_bytes": peak_memory(),
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*sys.argv[1:])

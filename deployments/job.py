"""``python -m deployments.job``: the driver of a Ray job that makes a dataset.

It joins a running application and captures on its replicas directly, so that this process owns
every reference and chunks stay in the object store. Whatever ends it, the storage root holds all
that is finished, and the same command goes on from there.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from wllm_ray.backend import capturer
from wllm_ray.cli.options import (
    BatchSize,
    DatasetId,
    Dtype,
    Format,
    FullTrace,
    Layers,
    Layout,
    Mixed,
    Position,
    Resume,
    RowsPerShard,
    SiteKind,
    Sites,
    batch_size_of,
    selection_of,
)
from wllm_ray.cli.outcome import report
from wllm_ray.cli.reporting import counted, fail, reports_errors, say
from wllm_ray.dataset.stores.probing import expect_create_only
from wllm_ray.dataset.stores.store import Store, expect_lasting, open_store
from wllm_ray.errors import InvalidInputError, StorageError, WLLMError
from wllm_ray.extraction import Offer
from wllm_ray.job.progress import ProgressLines
from wllm_ray.job.rows_file import RowsFile
from wllm_ray.job.run import Job, JobOutcome, RunOptions, run_job
from wllm_ray.job.source import NamedRows, SourcePlan, read_shards, spec_of
from wllm_ray.schema import StorageOptions

__all__ = ["main"]

STOPPED = 143
PROGRESS_PERIOD_S = 5.0
# `ray job stop` kills 3 s after it has asked.
STOP_GRACE_S = 1.5

Rows = Annotated[
    str,
    typer.Argument(help="UTF-8 JSONL: a path that the driver sees, or an object's URI."),
]
Storage = Annotated[
    str | None,
    typer.Option(help="Storage root to write to; default: the application's own."),
]
App = Annotated[str, typer.Option(help="Name of the Serve application.")]
Timeout = Annotated[float, typer.Option(min=0, help="Seconds to wait while it starts.")]


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asks, before it is known what is served."""

    layers: list[str] | None
    site: str
    sites: list[str] | None
    position: str
    dataset_id: str | None
    storage: StorageOptions
    batch_size: int | Literal["auto"]
    resume: bool
    root_uri: str | None

    def plan(self, offer: Offer, source: RowsFile) -> SourcePlan:
        """What is asked of this application.

        Raises:
            InvalidInputError: It cannot be, or is not offered.
        """
        selection = selection_of(
            offer.description,
            layers=self.layers,
            site=self.site,
            sites=self.sites,
            position=self.position,
        )
        return SourcePlan(
            offer.description,
            selection,
            source,
            self.dataset_id,
            offer.limits.shard,
            self.storage,
        )

    def root(self, offer: Offer) -> str:
        """Where the dataset is written.

        Raises:
            StorageError: Neither the command nor the application names a storage root.
        """
        root = self.root_uri or offer.storage_root
        if root is None:
            raise StorageError(
                "the application has no storage root of its own; name one with --storage",
                code="storage_not_configured",
            )
        return root


@reports_errors
def job(  # noqa: PLR0913 (one option per thing that can be asked)
    rows: Rows,
    *,
    layer: Layers = None,
    site: SiteKind = "block",
    hook_site: Sites = None,
    position: Position = "last_prompt",
    batch_size: BatchSize = "auto",
    rows_per_shard: RowsPerShard = None,
    shard_layout: Layout = "auto",
    shard_format: Format = "npy",
    storage_dtype: Dtype = "float32",
    mixed_fingerprints: Mixed = False,
    full_trace: FullTrace = False,
    dataset_id: DatasetId = None,
    storage: Storage = None,
    resume: Resume = True,
    app: App = "wllm",
    timeout: Timeout = 300.0,
) -> None:
    """Capture activations of the rows in a file on a running application, as a Ray job.

    `ray job submit --working-dir . -- python -m deployments.job rows.jsonl --layer 12`. The same
    command again goes on after an interruption, and finds finished work done. Exit codes: 0 done,
    1 rows failed, 2 input, output, transport or integrity error, 143 stopped.
    """
    try:
        asked = Asked(
            layers=layer,
            site=site,
            sites=hook_site,
            position=position,
            dataset_id=dataset_id,
            storage=StorageOptions(
                rows_per_shard=rows_per_shard,
                shard_layout=shard_layout,
                shard_format=shard_format,
                storage_dtype=storage_dtype,
                mixed_fingerprints=mixed_fingerprints,
                full_trace=full_trace,
            ),
            batch_size=batch_size_of(batch_size),
            resume=resume,
            root_uri=_absolute(storage),
        )
        source = RowsFile(rows)
        source.check()
        code = _drive(asked, source, app, timeout)
    except WLLMError as error:
        fail(error)
    raise typer.Exit(code)


def _absolute(storage: str | None) -> str | None:
    expect_lasting(storage or "")
    if storage is None or "://" in storage or Path(storage).is_absolute():
        return storage
    raise InvalidInputError(
        f"--storage takes an absolute path or a URI, found {storage!a}: a job runs in a copy of "
        f"its working directory, which goes when the cluster does",
        code="invalid_argument",
    )


def _drive(asked: Asked, source: RowsFile, app: str, timeout_s: float) -> int:
    from deployments.joining import connect, disconnect

    # Before the event loop has its signal handlers: Ray sets its own.
    connect()
    try:
        store, outcome = asyncio.run(_run(asked, source, app, timeout_s))
    except asyncio.CancelledError:
        return STOPPED
    # Ray prints what happened to its tasks on our stdout, whose last line is to be the summary.
    disconnect()
    return report(store, outcome, source)


async def _run(
    asked: Asked, source: RowsFile, app: str, timeout_s: float
) -> tuple[Store, JobOutcome]:
    from deployments.backend import RayBackend
    from deployments.joining import JoinedApplication, wait_running

    _stop_on_request()
    await asyncio.to_thread(wait_running, app, timeout_s)
    joined = await asyncio.to_thread(JoinedApplication, app, max(timeout_s, 1.0))
    offer = await asyncio.to_thread(joined.offer)
    plan, root = asked.plan(offer, source), asked.root(offer)
    store = open_store(root)
    await asyncio.to_thread(expect_create_only, store)
    spec = await asyncio.to_thread(spec_of, plan)
    size = f"{counted(spec.rows, 'row')} in {counted(len(spec.shards), 'shard')}"
    say(f"dataset {spec.dataset_id}: {size}, under {root}")
    backend, selection = RayBackend(joined.replicas, root), plan.selection
    work = Job(
        spec=spec,
        shards=lambda done: read_shards(
            source,
            spec,
            lambda rows, first: joined.tokenize(rows, selection.identity, first),
            done,
        ),
        rows_of=NamedRows(plan, spec),
        capture=capturer(backend, plan.captured),
        stage=backend.stage,
        commit=backend.commit,
        isolates=True,
        options=RunOptions(asked.batch_size, asked.resume, offer.limits.flow),
    )
    async with _progress() as progress:
        return store, await run_job(store, work, progress)


@contextlib.asynccontextmanager
async def _progress() -> AsyncIterator[ProgressLines]:
    """Say how far the job is every few seconds, and once at the end."""
    progress = ProgressLines()

    async def tell() -> None:
        while True:
            await asyncio.sleep(PROGRESS_PERIOD_S)
            say(progress.line())

    telling = asyncio.create_task(tell())
    try:
        yield progress
        say(progress.line())
    finally:
        telling.cancel()


def _stop_on_request() -> None:
    """On SIGTERM give replicas a moment to hear that their chunks are not wanted, then go."""
    task = asyncio.current_task()
    assert task is not None, "runs in a task"

    def stop() -> None:
        say("stopped; what is written stays, and submitting it again goes on from there")
        timer = threading.Timer(STOP_GRACE_S, os._exit, (STOPPED,))
        timer.daemon = True
        timer.start()
        task.cancel()

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)


def main() -> None:
    """Entry point of ``python -m deployments.job``."""
    # Our own report never shows local variables, which may hold prompts.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(job)
    app()


if __name__ == "__main__":
    main()

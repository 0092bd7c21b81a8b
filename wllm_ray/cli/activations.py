"""``wllm activations``: a JSONL file in, a dataset on this machine out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from wllm_ray.cli.interruption import run_async
from wllm_ray.cli.options import (
    LOCAL_APPLICATION,
    BaseUrl,
    BatchSize,
    DatasetId,
    Dtype,
    Format,
    Layers,
    Layout,
    Mixed,
    Position,
    Quiet,
    Resume,
    RowsPerShard,
    SiteKind,
    Sites,
    batch_size_of,
    selection_of,
)
from wllm_ray.cli.reporting import ends_with_json

if TYPE_CHECKING:
    from wllm_ray.cli.progress import ProgressBar
    from wllm_ray.coordinator import FlowLimits
    from wllm_ray.schema import StorageOptions

__all__ = ["activations"]

Rows = Annotated[
    Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="UTF-8 JSONL file.")
]
Model = Annotated[str, typer.Option(help="The served model's name.")]
Output = Annotated[str, typer.Option(help="Storage root to write to: a folder or a URI.")]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="WLLM_API_KEY", help="Better set in the environment: `ps` shows it."),
]
Patience = Annotated[
    float, typer.Option(min=0, help="Seconds to wait for a server that went away.")
]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds for one answer.")]


@ends_with_json
def activations(  # noqa: PLR0913 (one option per thing that can be asked)
    rows: Rows,
    *,
    model: Model,
    output: Output,
    base_url: BaseUrl = LOCAL_APPLICATION,
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
    dataset_id: DatasetId = None,
    resume: Resume = True,
    api_key: ApiKey = None,
    patience: Patience = 300.0,
    timeout: Timeout = 600.0,
    quiet: Quiet = False,
) -> None:
    """Capture activations of the rows in a file and write them as a dataset here.

    Each line is a JSON object with `id`, one of `prompt`, `messages` and `token_ids`, and
    optional `metadata`. A malformed line refuses the whole file before anything is sent. Run the
    same command again to go on after an interruption or to retry rows whose failure may pass.
    """
    from wllm_ray.schema import StorageOptions

    run = _Run(
        path=rows,
        output=output,
        base_url=base_url,
        api_key=api_key,
        patience_s=patience,
        timeout_s=timeout,
        quiet=quiet,
    )
    asked = {"layers": layer, "site": site, "sites": hook_site, "position": position}
    code = run_async(
        run.capture(
            model,
            asked,
            dataset_id=dataset_id,
            storage=StorageOptions(
                rows_per_shard=rows_per_shard,
                shard_layout=shard_layout,
                shard_format=shard_format,
                storage_dtype=storage_dtype,
                mixed_fingerprints=mixed_fingerprints,
            ),
            batch_size=batch_size_of(batch_size),
            resume=resume,
        )
    )
    raise typer.Exit(code)


class _Run:
    """Where a run reads and writes, and whom it asks."""

    def __init__(
        self,
        *,
        path: Path,
        output: str,
        base_url: str,
        api_key: str | None,
        patience_s: float,
        timeout_s: float,
        quiet: bool,
    ) -> None:
        from wllm_ray.client.connection import Connection
        from wllm_ray.dataset.stores.store import expect_lasting, open_store

        self._path, self._quiet = path, quiet
        expect_lasting(output)
        self._store = open_store(output)
        self._patience_s, self._timeout_s = patience_s, timeout_s
        self._connection = Connection(base_url, api_key=api_key, timeout_s=timeout_s)

    async def capture(
        self,
        model: str,
        asked: dict[str, Any],
        *,
        dataset_id: str | None,
        storage: StorageOptions,
        batch_size: int | Literal["auto"],
        resume: bool,
    ) -> int:
        """Run the job, report it, and return the exit code."""
        from wllm_ray.cli.outcome import report
        from wllm_ray.client.job import run_over_http
        from wllm_ray.client.remote import Remote
        from wllm_ray.job.rows_file import RowsFile
        from wllm_ray.job.run import RunOptions
        from wllm_ray.job.source import SourcePlan
        from wllm_ray.schema import ExtractionSchema

        try:
            source = RowsFile(self._path)
            # An application that is not there at the beginning is told at once, not waited for.
            card = await self._connection.model(model)
            self._connection.patience_s = self._patience_s
            schema = await self._connection.get("/v1/extraction-schema", ExtractionSchema)
            selection = selection_of(card, **asked)
            plan = SourcePlan(card, selection, source, dataset_id, storage=storage)
            remote = Remote(self._connection, card, selection, schema)
            options = RunOptions(batch_size, resume, self._flow())
            with _progress(quiet=self._quiet) as progress:
                outcome = await run_over_http(remote, self._store, plan, options, progress)
            return await asyncio.to_thread(report, self._store, outcome, source)
        finally:
            await self._connection.close()

    def _flow(self) -> FlowLimits:
        """One attempt at a chunk: the connection repeats requests itself."""
        from wllm_ray.coordinator import FlowLimits

        return FlowLimits(attempts=1, chunk_deadline_s=self._patience_s + 2 * self._timeout_s)


def _progress(*, quiet: bool) -> ProgressBar:
    from wllm_ray.cli.progress import ProgressBar

    return ProgressBar(quiet=quiet)

"""``wllm activations``: a JSONL file in, a dataset on this machine out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from wllm_ray.cli.options import LOCAL_APPLICATION, BaseUrl
from wllm_ray.cli.reporting import DONE, ROWS_FAILED, print_json, reports_errors, say
from wllm_ray.errors import InvalidInputError, WLLMError

if TYPE_CHECKING:
    from wllm_ray.cli.progress import ProgressBar
    from wllm_ray.client.job import JobOutcome
    from wllm_ray.schema import ModelCard

__all__ = ["activations"]

LISTED_FAILURES = 10


Rows = Annotated[
    Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="UTF-8 JSONL file.")
]
Model = Annotated[str, typer.Option(help="The served model's name.")]
Output = Annotated[str, typer.Option(help="Storage root to write to: a folder or a URI.")]
Layers = Annotated[
    list[str] | None,
    typer.Option(help="Zero-based blocks: `12`, `0,5,9` or `all`; may be repeated."),
]
SiteKind = Annotated[str, typer.Option(help="Site kind for --layer; `block` is resid_post.")]
Sites = Annotated[
    list[str] | None,
    typer.Option("--hook-site", "--sites", help="Further sites by name: `L12_mlp_out`."),
]
Position = Annotated[str, typer.Option(help="Which token of a row.")]
BatchSize = Annotated[str, typer.Option(help="Rows per request, or `auto`.")]
RowsPerShard = Annotated[
    int | None, typer.Option(min=1, max=1_048_576, help="Upper bound of a shard.")
]
DatasetId = Annotated[
    str | None, typer.Option(help="Default: made from what is asked, so it is found again.")
]
Resume = Annotated[bool, typer.Option("--resume/--no-resume", help="Go on with what is there.")]
ApiKey = Annotated[
    str | None,
    typer.Option(envvar="WLLM_API_KEY", help="Better set in the environment: `ps` shows it."),
]
Patience = Annotated[
    float, typer.Option(min=0, help="Seconds to wait for a server that went away.")
]
Timeout = Annotated[float, typer.Option(min=1, help="Seconds for one answer.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")]


@reports_errors
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
    run = _Run(
        path=rows,
        output=output,
        base_url=base_url,
        api_key=api_key,
        patience_s=patience,
        timeout_s=timeout,
        quiet=quiet,
    )
    asked = {"site": site, "sites": _split(hook_site), "position": position}
    try:
        code = asyncio.run(
            run.capture(
                model,
                layer,
                asked,
                dataset_id=dataset_id,
                rows_per_shard=rows_per_shard,
                batch_size=_batch_size(batch_size),
                resume=resume,
            )
        )
    except WLLMError as error:
        print_json({"status": "error", "exit_code": 2, **error.to_json()})
        raise
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
        from wllm_ray.dataset.store import open_store

        self._path, self._quiet = path, quiet
        self._store = open_store(output)
        self._patience_s, self._timeout_s = patience_s, timeout_s
        self._connection = Connection(base_url, api_key=api_key, timeout_s=timeout_s)

    async def capture(
        self,
        model: str,
        layers: list[str] | None,
        asked: dict[str, Any],
        *,
        dataset_id: str | None,
        rows_per_shard: int | None,
        batch_size: int | Literal["auto"],
        resume: bool,
    ) -> int:
        """Run the job, report it, and return the exit code."""
        from wllm_ray.cli.rows_file import RowsFile
        from wllm_ray.client.job import JobPlan, run_job
        from wllm_ray.coordinator import FlowLimits
        from wllm_ray.plan import ShardLimits
        from wllm_ray.requests import select

        try:
            source = RowsFile(self._path)
            # An application that is not there at the beginning is told at once, not waited for.
            card = await self._connection.model(model)
            self._connection.patience_s = self._patience_s
            limits = ShardLimits() if rows_per_shard is None else ShardLimits(rows_per_shard)
            deadline_s = self._patience_s + 2 * self._timeout_s
            plan = JobPlan(
                card,
                select(card, layers=_layers(layers, card), **asked),
                source,
                dataset_id,
                limits,
                batch_size,
                resume,
                FlowLimits(attempts=1, chunk_deadline_s=deadline_s),
            )
            with _progress(quiet=self._quiet) as progress:
                outcome = await run_job(self._connection, self._store, plan, progress)
            return await asyncio.to_thread(self._report, outcome, source)
        finally:
            await self._connection.close()

    def _report(self, outcome: JobOutcome, source: Any) -> int:
        from wllm_ray.cli.summary import failures_of, summary_of, write_run_files

        failures = list(failures_of(self._store, outcome, source))
        summary = summary_of(self._store, outcome, failures)
        write_run_files(self._store, outcome.spec.dataset_id, summary, failures)
        code = ROWS_FAILED if failures else DONE
        _say_result(outcome, failures)
        print_json({**summary, "shards_resumed": outcome.resumed, "exit_code": code})
        return code


def _say_result(outcome: JobOutcome, failures: list[dict[str, Any]]) -> None:
    for one in failures[:LISTED_FAILURES]:
        kind = "permanent" if one["permanent"] else "may pass"
        say(f"  row {one['index']} {one['id']!a}: {one['code']} ({kind}): {one['message']}")
    if len(failures) > LISTED_FAILURES:
        say(f"  and {len(failures) - LISTED_FAILURES} more")
    dataset_id, rows = outcome.spec.dataset_id, outcome.spec.rows
    if outcome.manifest is not None:
        say(f"dataset {dataset_id}: {rows} rows, {outcome.manifest.rows_failed} failed, committed")
        return
    kept, total = len(outcome.receipts), len(outcome.spec.shards)
    say(
        f"dataset {dataset_id}: {len(outcome.transient)} of {rows} rows failed for reasons that "
        f"may pass, so nothing was committed; {kept} of {total} shards are kept, run the same "
        f"command again to finish the rest"
    )


def _progress(*, quiet: bool) -> ProgressBar:
    from wllm_ray.cli.progress import ProgressBar

    return ProgressBar(quiet=quiet)


def _split(values: list[str] | None) -> list[str]:
    return [part.strip() for value in values or () for part in value.split(",") if part.strip()]


def _layers(values: list[str] | None, card: ModelCard) -> list[int]:
    parts = _split(values)
    if parts == ["all"]:
        return list(range(card.num_layers))
    for part in parts:
        if not (part.isascii() and part.isdigit()):
            raise InvalidInputError(
                f"--layer takes zero-based block numbers, or `all` alone; found {part!a}",
                code="invalid_argument",
            )
    return [int(part) for part in parts]


def _batch_size(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if text.isascii() and text.isdigit() and 1 <= int(text) <= 4096:  # noqa: PLR2004 (as in HTTP)
        return int(text)
    raise InvalidInputError(
        f"--batch-size takes 1 to 4096, or `auto`; found {text!a}", code="invalid_argument"
    )

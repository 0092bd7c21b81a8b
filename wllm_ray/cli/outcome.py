"""The end of a run: its files, what people read, and the last line on stdout."""

from __future__ import annotations

from typing import Any

from wllm_ray.cli.reporting import DONE, ROWS_FAILED, counted, print_json, say
from wllm_ray.dataset.stores.store import Store
from wllm_ray.job.run import JobOutcome
from wllm_ray.job.source import RowSource
from wllm_ray.job.summary import failures_of, summary_of, write_run_files

__all__ = ["report"]

LISTED_FAILURES = 10


def report(store: Store, outcome: JobOutcome, rows: RowSource) -> int:
    """Write and print what came of a job, and return the exit code."""
    failures = list(failures_of(store, outcome, rows))
    summary = summary_of(store, outcome, failures)
    write_run_files(store, outcome.spec.dataset_id, summary, failures)
    code = ROWS_FAILED if failures else DONE
    _say_result(outcome, failures)
    ran = {
        "shards_resumed": outcome.resumed,
        "shards_written": len(outcome.receipts) - outcome.resumed - len(outcome.superseded),
        "shards_superseded": len(outcome.superseded),
        "exit_code": code,
    }
    print_json(summary | ran)
    return code


def _say_result(outcome: JobOutcome, failures: list[dict[str, Any]]) -> None:
    for one in failures[:LISTED_FAILURES]:
        kind = "permanent" if one["permanent"] else "may pass"
        say(f"  row {one['index']} {one['id']!a}: {one['code']} ({kind}): {one['message']}")
    if len(failures) > LISTED_FAILURES:
        say(f"  and {len(failures) - LISTED_FAILURES} more")
    dataset_id, rows = outcome.spec.dataset_id, counted(outcome.spec.rows, "row")
    if outcome.manifest is not None:
        say(f"dataset {dataset_id}: {rows}, {outcome.manifest.rows_failed} failed, committed")
        return
    kept, shards = len(outcome.receipts), counted(len(outcome.spec.shards), "shard")
    are_kept = "is kept" if kept == 1 else "are kept"
    say(
        f"dataset {dataset_id}: {len(outcome.transient)} of {rows} failed for reasons that "
        f"may pass, so nothing was committed; {kept} of {shards} {are_kept}, run the same command "
        f"again to finish the rest"
    )

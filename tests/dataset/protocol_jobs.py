"""What the writers of the protocol's model do: whole jobs, single shards, and tidying up."""

from __future__ import annotations

import contextlib
import itertools
from datetime import UTC, datetime, timedelta

import numpy as np
from dataset_builders import FAILED_ROW, capture, captured_of, features_of, make_rows, rows_of

from wllm_ray.dataset.format.manifest import TraceSpec
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.dataset.tools.abandon import abandon_dataset
from wllm_ray.dataset.tools.gc import collect_garbage
from wllm_ray.dataset.writing.writer import commit_manifest, create_spec, stage_shard, staged_shards
from wllm_ray.errors import NotFoundError
from wllm_ray.records import RowFailure

ROWS = make_rows(5, failed=[FAILED_ROW])
GOOD = [row for row in ROWS if row.failure is None]
SHARDS = 3
PER_SITE = {"sites": ("embed", "L1_attn_out_prelinear"), "site_widths": (4, 6)}
TRACE = {"sites": ("embed", "L1_attn_out_prelinear", "L2_mlp_out"), "site_widths": (4, 6, 3)}
KINDS = {
    "one file": {},
    "a file for each site": PER_SITE,
    "arrow": PER_SITE | {"shard_format": "arrow"},
    "traces": PER_SITE | {"trace": TraceSpec(**TRACE)},
}
LOST = RowFailure.of("replica_lost", "gone")
ATTEMPT_STEP = np.float32(1 / 1024)
_names = itertools.count()


class Engine:
    """One attempt's engine: what it measures may differ from attempt to attempt.

    Args:
        attempt: 0 in class ``bitwise``, where all attempts measure the same.
        threads: Enters the fingerprint.
        loses: How often each row gets lost before it is captured.
    """

    def __init__(self, attempt=0, threads=1, loses=0):
        self.attempt, self.loses = attempt, loses
        self.says = {"threads": threads, "reproducibility": "tolerance" if attempt else "bitwise"}

    def capture(self, rows, spec, **options):
        features = {
            row.index: features_of(row, captured_of(spec)) + self.attempt * ATTEMPT_STEP
            for row in rows
            if row.failure is None
        }
        return capture(rows, spec, features=features, **options, **self.says)


def stage(writer, store, *, spec, shard, engine):
    rows = rows_of(spec, ROWS, shard)
    good = [row.index for row in rows if row.failure is None]
    before = writer.operations
    chunks = []
    for _ in range(engine.loses if good else 0):
        chunks.append(engine.capture(rows, spec, failures=dict.fromkeys(good, LOST)))
        refused = stage_shard(store, spec, shard, rows, chunks)
        assert refused.receipt is None
        assert set(refused.transient) == set(good)
    assert writer.operations == before  # nothing is so much as looked at
    return stage_shard(store, spec, shard, rows, [*chunks, engine.capture(rows, spec)])


def run_job(writer, store, *, spec, engine):
    create_spec(store, spec)
    done = staged_shards(store, spec)
    for shard in set(range(SHARDS)) - set(done):
        stage(writer, store, spec=spec, shard=shard, engine=engine)
    return commit_manifest(store, "d")


def remove_leftovers(store):
    """Every file that may ever go, however young it is."""
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    list(collect_garbage(store, "d", delete=True, older_than=timedelta(0), now=tomorrow))


def give_up(store):
    """The whole dataset, however young its files are."""
    with contextlib.suppress(NotFoundError):  # nothing was begun
        abandon_dataset(store, "d", delete=True, older_than=timedelta(0))


def expected_content(spec, threads):
    """What one undisturbed writer comes to, where every attempt measures the same.

    ``threads`` is shard → what the engine of that shard says of itself.
    """
    store = open_store(f"memory://undisturbed-{next(_names)}")
    create_spec(store, spec)
    for shard in range(SHARDS):
        part = rows_of(spec, ROWS, shard)
        stage_shard(store, spec, shard, part, [capture(part, spec, threads=threads[shard])])
    return commit_manifest(store, "d").content_sha256

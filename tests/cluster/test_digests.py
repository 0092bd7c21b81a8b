"""The same job gives the same bytes: one replica or two, other chunks, and whatever is killed."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from tiny_models import LAYERS, VOCAB

from deployments.demo.model import prepare_model
from tests.cluster.conftest import ROOT
from tests.cluster.fire import (
    MAX_LEN,
    ONE_AND_TWO,
    App,
    Fire,
    applications,
    here,
    kill_one,
    marks,
    replica,
    tiny_model,
    write_rows,
)
from wllm_ray import load_dataset

pytestmark = pytest.mark.requirement("D-3", "R-3")

# One model in every run, the others in the long sweeps: each loads three engines or more.
CROWDED = ("qwen3", torch.bfloat16)
OTHER_TINY = [
    ("qwen3", torch.float32),
    ("gemma3", torch.float32),
    ("gemma3", torch.bfloat16),
]
# Thirty blocks of 32 tokens, in bfloat16: one and a half of the longest rows.
SMALL_CACHE = {"kv_cache_memory_bytes": 30 * 32 * 2 * LAYERS * 2 * 32 * 2}


@pytest.fixture(
    scope="module",
    params=[
        CROWDED,
        *(pytest.param(one, marks=pytest.mark.slow) for one in OTHER_TINY),
        *(pytest.param((None, d), marks=pytest.mark.slow) for d in ("bfloat16", "float32")),
    ],
    ids=lambda one: f"{one[0] or 'real'}-{str(one[1]).removeprefix('torch.')}",
)
def fire(request, own_cluster, tmp_path_factory):
    """Both applications of one model in one dtype, and 300 rows of 5 to 600 tokens."""
    family, dtype = request.param
    home = tmp_path_factory.mktemp("fire")
    if family is None:
        path, vocabulary, split = prepare_model(ROOT / ".demo/models"), 10_000, 1024
    else:
        path, vocabulary, split = tiny_model(home, family, dtype), VOCAB, 256
    rows = write_rows(home / "rows.jsonl", count=300, longest=600, vocabulary=vocabulary)
    crowded = App("crowded", 1, f"{here('loaders')}:build_crowded", SMALL_CACHE)
    apps = (*ONE_AND_TWO, crowded) if (family, dtype) == CROWDED else ONE_AND_TWO
    args = {
        "model": str(path),
        "dtype": str(dtype).removeprefix("torch."),
        "max_model_len": MAX_LEN,
        "prefill_split_tokens": split,
    }
    with applications(home, own_cluster, apps, **args):
        yield Fire(own_cluster, home, rows)


@pytest.fixture(scope="module")
def expected(fire):
    """One replica, chunks of 7, undisturbed."""
    digest = fire.digest("one", "expected", 7)
    dataset = load_dataset(fire.home / "root", "expected", verify="full")
    assert dataset.manifest.fingerprint.reproducibility == "bitwise"
    assert dataset.manifest.rows_failed == 0
    return digest


def test_two_replicas_and_other_chunks(fire, expected):
    assert fire.digest("two", "two-replicas", 64) == expected


def test_a_replica_is_killed_with_chunks_in_flight(fire, expected):
    driver = fire.start("two", "replica-killed", 7)
    fire.until_receipts("replica-killed", 2, driver)
    assert kill_one(replica("two"))
    assert fire.finish(driver)["content_sha256"] == expected


def test_every_stage_task_is_killed_between_its_writes(fire, expected):
    folder = marks(fire.home, "stage")
    digest = fire.digest(
        "one", "stage-killed", 64, module=here("dying_tasks"), WLLM_TEST_MARKS=folder
    )
    assert digest == expected
    assert len(list(Path(folder).iterdir())) == 12, "each shard's task has died once"


def test_the_driver_is_killed_and_the_job_submitted_again(fire, expected):
    driver = fire.start("two", "driver-killed", 7)
    fire.until_receipts("driver-killed", 3, driver)
    driver.kill()
    driver.communicate()
    left = fire.receipts("driver-killed")
    summary = fire.finish(fire.start("two", "driver-killed", 16))
    assert summary["content_sha256"] == expected
    assert 3 <= summary["shards_resumed"] <= left + 3


@pytest.mark.parametrize("fire", [CROWDED], indirect=True, ids=["qwen3-bfloat16"])
def test_an_engine_that_preempts_gives_the_same_bytes(fire, expected):
    """Rows that were thrown out and run again in other pieces fail for now and are retried."""
    assert fire.digest("crowded", "crowded", 64) == expected
    assert list((fire.home / "notes").glob("preempted-*")), "nothing was pre-empted"


def test_all_datasets_hold_the_same_features_in_row_order(fire, expected):
    """Not only the digests: the rows themselves, and labels that belong to them."""
    names = ["expected", "two-replicas", "replica-killed", "stage-killed", "driver-killed"]
    datasets = [load_dataset(fire.home / "root", name, verify="full") for name in names]
    lengths = [len(json.loads(line)["token_ids"]) for line in fire.rows.read_text().splitlines()]
    for one, other in itertools.pairwise(datasets):
        assert (one.features_3d == other.features_3d).all()
        assert one.row_ids == other.row_ids
    assert [row["tokens"] for row in datasets[0].metadata] == lengths
    assert [len(ids) for ids in datasets[0].token_ids] == lengths

"""Kills at random moments, seeded: replicas, stage tasks and the driver itself."""

import json
import random
import time

import pytest
import torch
from tiny_models import VOCAB

from tests.cluster.fire import (
    DEADLINE_S,
    MAX_LEN,
    Fire,
    applications,
    kill_one,
    replica,
    tiny_model,
    write_rows,
)
from wllm_ray import load_dataset

pytestmark = pytest.mark.requirement("R-3", "D-3", "D-4")

KILLS = 6
# A driver of this job takes some seconds to join; kills reach from before that to its end.
LONGEST_WAIT_S = 5.0
# A driver that was left with transient failures is submitted again, as its message says.
RESUBMISSIONS = 3


@pytest.fixture(scope="module")
def fire(own_cluster, tmp_path_factory):
    home = tmp_path_factory.mktemp("chaos")
    model = tiny_model(home, "qwen3", torch.bfloat16)
    rows = write_rows(home / "rows.jsonl", count=600, longest=600, vocabulary=VOCAB)
    args = {
        "model": str(model),
        "max_model_len": MAX_LEN,
        "prefill_split_tokens": 256,
    }
    with applications(home, own_cluster, **args):
        yield Fire(own_cluster, home, rows)


@pytest.fixture(scope="module")
def expected(fire):
    return fire.digest("one", "expected", 64)


def under_fire(fire: Fire, dataset_id: str, chance: random.Random) -> dict:
    """Run a job to its end while something is killed again and again; its summary."""
    driver, kills = fire.start("two", dataset_id, 7), 0
    while kills < KILLS:
        time.sleep(chance.uniform(0.1, LONGEST_WAIT_S))
        if driver.poll() is not None:
            driver.communicate()
            driver = fire.start("two", dataset_id, 7)
        victim = chance.choice(["replica", "stage", "driver"])
        if victim == "replica":
            kills += kill_one(replica("two"), chance)
        elif victim == "stage":
            kills += kill_one("ray::stage_shard", chance) or kill_one(replica("two"), chance)
        else:
            driver.kill()
            driver.communicate()
            kills += 1
            driver = fire.start("two", dataset_id, chance.choice([7, 16, 64]))
    for _ in range(RESUBMISSIONS):
        stdout, stderr = driver.communicate(timeout=DEADLINE_S)
        if driver.returncode == 0:
            return json.loads(stdout.splitlines()[-1])
        driver = fire.start("two", dataset_id, 7)
    raise AssertionError(f"it does not finish: {stderr[-4000:]}")


def check(fire: Fire, expected: str, seed: int) -> None:
    dataset_id = f"chaos-{seed}"
    summary = under_fire(fire, dataset_id, random.Random(seed))
    assert summary["content_sha256"] == expected, f"seed {seed}"
    dataset = load_dataset(fire.home / "root", dataset_id, verify="full")
    assert dataset.row_ids == [f"r{index}" for index in range(600)]


def test_six_kills_leave_the_digest_unchanged(fire, expected):
    check(fire, expected, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_six_kills_at_other_moments_do_too(fire, expected, seed):
    check(fire, expected, seed)

"""What an application makes of rows that kill its engines, and of callers that leave."""

import time

import httpx
import pytest
import torch

from tests.cluster.fire import App, applications, here, tiny_model
from tests.fakes import POISON
from wllm_ray import load_dataset

DEADLINE_S = 240


@pytest.fixture(scope="module")
def faulty(own_cluster, tmp_path_factory):
    """Base URLs of an application that can be poisoned and of one that is slow, and their home."""
    home = tmp_path_factory.mktemp("faulty")
    tiny_model(home, "qwen3", torch.float32)
    apps = [
        App("poisonable", 2, f"{here('loaders')}:build_poisonable"),
        App("slow", 1, f"{here('loaders')}:build_slow"),
    ]
    root = home / "root"
    with applications(
        home, own_cluster, apps, model=str(home / "model"), storage_root=str(root)
    ) as url:
        yield url, home


def body(app: str, rows: list[dict], **fields) -> dict:
    return {"model": "gemma-3-270m", "rows": rows, "layers": [0, 2], **fields}


@pytest.mark.requirement("R-4", "D-10", "R-5")
def test_a_poisonous_row_is_found_and_the_others_are_committed(faulty):
    url, home = faulty
    rows = [{"id": f"r{n}", "token_ids": [5, 6, 7 + n]} for n in range(12)]
    rows[4]["token_ids"] = [5, POISON, 7]
    answer = httpx.post(
        f"{url('poisonable')}/v1/activation-datasets",
        json=body("poisonable", rows, persistence="dataset", dataset_id="poisoned", batch_size=4),
        timeout=DEADLINE_S,
    )
    assert answer.status_code == 200, answer.text
    codes = [row["failure"] and row["failure"]["code"] for row in answer.json()["rows"]]
    assert codes == [None] * 4 + ["poisonous"] + [None] * 7
    dataset = load_dataset(home / "root", "poisoned", verify="full")
    assert dataset.row_ids == [f"r{n}" for n in range(12) if n != 4]
    assert dataset.failures["r4"].permanent
    again = httpx.post(
        f"{url('poisonable')}/v1/activation-datasets",
        json=body("poisonable", rows, persistence="dataset", dataset_id="poisoned", batch_size=4),
        timeout=DEADLINE_S,
    )
    assert again.json()["dataset"] == answer.json()["dataset"]


@pytest.mark.requirement("R-7")
def test_a_caller_that_leaves_stops_its_inline_work(faulty):
    url, home = faulty
    notes = home / "notes"
    rows = [{"id": "a", "token_ids": [5, 6]}]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url('slow')}/v1/activation-datasets", json=body("slow", rows), timeout=5)
    assert until((notes / "began-0").exists)
    assert until((notes / "cancelled-0").exists), "the replica still works for nobody"


def until(condition, seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.1)
    return found

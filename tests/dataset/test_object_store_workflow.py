"""What a person does with a dataset in an object store, by the commands of the README."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.fakes import MODEL, Application, FakeEngine, serving
from wllm_ray import load_dataset
from wllm_ray.dataset.stores.store import open_store

WLLM = [sys.executable, "-c", "from wllm_ray.cli import main; main()"]
STORED = ("--shard-format", "arrow", "--storage-dtype", "float16", "--rows-per-shard", "2")


def start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [*WLLM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def run(*arguments: str) -> str:
    """Standard output of a command that must succeed."""
    process = start(*arguments)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stdout + stderr
    return stdout


def until(condition) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


@pytest.mark.requirement("D-1", "D-3", "D-4", "D-5", "L-3", "L-4")
def test_the_same_dataset_on_a_disk_and_in_an_object_store_killed_and_resumed(tmp_path, s3_root):
    rows = tmp_path / "rows.jsonl"
    texts = [{"id": f"r{n}", "prompt": f"prompt {n}", "metadata": {"n": n}} for n in range(24)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in texts))
    store = open_store(s3_root)

    def receipts() -> int:
        return sum("receipt" in key for key, _ in store.list("datasets/d"))

    with serving(Application(engine=FakeEngine(delay_s=0.1))) as address:
        asked = ("activations", str(rows), "--base-url", address, "--model", MODEL, "--quiet")
        asked += ("--layer", "0,3", "--dataset-id", "d", "--position", "all_prompt", *STORED)
        killed = start(*asked, "--output", s3_root, "--batch-size", "1")
        until(lambda: receipts() >= 2)
        os.kill(killed.pid, signal.SIGKILL)
        killed.communicate()
        assert 2 <= receipts() < 12
        assert "begun" in run("inspect", s3_root, "d")
        finished = json.loads(run(*asked, "--output", s3_root).splitlines()[-1])
        assert finished["shards_resumed"] >= 2
        whole = json.loads(run(*asked, "--output", str(tmp_path / "disk")).splitlines()[-1])
    assert finished["content_sha256"] == whole["content_sha256"]

    there, here = load_dataset(s3_root, "d"), load_dataset(tmp_path / "disk", "d")
    assert np.array_equal(there.features_3d, here.features_3d)
    assert np.array_equal(there.select(["r7"]).features, here.select(["r7"]).features)
    assert json.loads(run("verify", s3_root, "d", "--json"))["ok"]
    run("merge", s3_root, "d", "--into", "merged")
    assert load_dataset(s3_root, "merged", verify="full").row_ids == here.row_ids
    run("gc", s3_root)
    exported = tmp_path / "parquet"
    run("export", s3_root, "merged", "--to", "parquet", "--output", str(exported))
    assert list(exported.rglob("*.parquet"))

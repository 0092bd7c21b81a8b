"""A dataset of format version 1, committed to the repository: it must load for ever."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from dataset_builders import FAILED_ROW, make_rows, value_of, write_dataset

from wllm_ray.dataset.reader import load_dataset
from wllm_ray.dataset.store import open_store

pytestmark = pytest.mark.requirement("D-1", "D-3")

GOLDEN = Path(__file__).parent / "golden/v1"
OPTIONS = {
    "dataset_id": "golden",
    "position": "all_prompt",
    "sites": ("embed", "L3_mlp_out"),
}
CONTENT_SHA256 = "57736228000519130dc794893632ddf1783dadf8be43392f0c23f6b4b003c25b"
MANIFEST_SHA256 = "b833cd75cd0c5a6c3782048088d65149f6f7991b019190f015d6882e05bece49"
FEATURES_SHA256 = [
    "f687a5dffc295aeb33e8f369a23e827f03c91ef107fb693994e77c6a52b0f5e4",
    "b6bb75a8294b0c08c68114793d9ac3b1612bcb104aca9d49810c7c1ff1eb9074",
]
ROWS_SHA256 = [
    "711e5c53e70c04e73fbd519b55ae8f3fd68d8a084fa81fe535f837486ae9b25f",
    "2613e89e4186949851e522537fb8a98e9d306a1f2707826a380e4e9cf510da67",
]


def write_golden(root):
    """How the committed files were made; done once for each version of the format."""
    rows = make_rows(5, failed=[FAILED_ROW], sites=OPTIONS["sites"])
    return write_dataset(open_store(root), rows, **OPTIONS)


def test_version_1_loads():
    dataset = load_dataset(GOLDEN, "golden", verify="full")
    assert dataset.row_ids == ["r-0", "🙂 2", "e\u03013", "r-4"]
    assert list(dataset.failures) == ["行-1"]
    assert dataset.manifest.sites == ("embed", "L3_mlp_out")
    assert dataset.offsets.tolist() == [0, 2, 6, 8, 11]
    expected = [
        [value_of(row, position, site) for site in range(2)]
        for row, length in ((0, 2), (2, 4), (3, 2), (4, 3))
        for position in range(length)
    ]
    assert np.array_equal(dataset.features, expected)
    assert dataset.metadata[0]["n"] == 10**30


def test_its_digests_are_what_they_were():
    manifest = load_dataset(GOLDEN, "golden").manifest
    assert manifest.content_sha256 == CONTENT_SHA256
    assert manifest.manifest_sha256 == MANIFEST_SHA256
    assert [shard.file("features").sha256 for shard in manifest.shards] == FEATURES_SHA256
    assert [shard.rows_sha256 for shard in manifest.shards] == ROWS_SHA256


def test_the_writer_still_writes_the_same_content(tmp_path):
    manifest = write_golden(tmp_path)
    assert manifest.content_sha256 == CONTENT_SHA256


def test_it_is_small():
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 20_000


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    written = write_golden(GOLDEN)
    sys.stdout.write(f"{written.model_dump_json(indent=1)}\n")

"""Datasets of format version 1, committed to the repository: they must load for ever."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from dataset_builders import (
    FAILED_ROW,
    make_rows,
    make_spec,
    site_values,
    value_of,
    write_dataset,
)

from wllm_ray.dataset.reader import load_dataset
from wllm_ray.dataset.store import open_store

pytestmark = pytest.mark.requirement("D-1", "D-3")

GOLDEN = Path(__file__).parent / "golden/v1"
# One file of all sites for each shard, and one file for each site.
DATASETS = {
    "golden": {"position": "all_prompt", "sites": ("embed", "L3_mlp_out")},
    "golden-per-site": {
        "position": "index:0,-1",
        "sites": ("embed", "L2_attn_out_prelinear"),
        "site_widths": (4, 6),
    },
}
DIGESTS = {
    "golden": {
        "content": "7e53cde51c391ac694b590fd378d25a27aa9ec5e56ba39f3d300b5810c2a7ffa",
        "manifest": "440b97c1535ee067dca59f38551d83f7bc3ac16d1bfa48df61a28fcf0c348a86",
        "features": [
            "f687a5dffc295aeb33e8f369a23e827f03c91ef107fb693994e77c6a52b0f5e4",
            "b6bb75a8294b0c08c68114793d9ac3b1612bcb104aca9d49810c7c1ff1eb9074",
        ],
        "rows": [
            "711e5c53e70c04e73fbd519b55ae8f3fd68d8a084fa81fe535f837486ae9b25f",
            "2613e89e4186949851e522537fb8a98e9d306a1f2707826a380e4e9cf510da67",
        ],
    },
    "golden-per-site": {
        "content": "7f2e856e527f49750da37d9a160dc3b18bb05d655fc51a7a54d4d81274582fe9",
        "manifest": "a00292e55aebbd6ceeb0b59f7c4aa017ee26910f8c466aeda277179e762dc03b",
        "features": [
            "b98f7d5b1ec9fc82b773771a952768c687f1b113a14eb8c2d9e4a103093f6ebb",
            "56cc3d48cba9a18951dedbad031d643db55f97f669bf98ab8f24dfa51567acc4",
            "2ba425152aa93dac29e264d5873657efcbdb1bcc4dd1a54ebf443dc9db133605",
            "4aac186203bfa45d93d97decbc75c28b73d76787b785465a898aa8907fbe4d22",
        ],
        "rows": [
            "b2e3f561acaa80d6624c2bad678b13f95a741ee7532f5f64a140c630295e3a7f",
            "031aae13df911df53442df4b4971d27fd117820b9ef5320faa3acb08a871e299",
        ],
    },
}


def golden_rows(name):
    return make_rows(5, failed=[FAILED_ROW], sites=DATASETS[name]["sites"])


def write_golden(root, name):
    """How the committed files were made; done once for each version of the format."""
    return write_dataset(open_store(root), golden_rows(name), dataset_id=name, **DATASETS[name])


def digests(manifest):
    """Every digest that says what is in a dataset."""
    return {
        "content": manifest.content_sha256,
        "manifest": manifest.manifest_sha256,
        "features": [one.sha256 for shard in manifest.shards for one in shard.features_files],
        "rows": [shard.rows_sha256 for shard in manifest.shards],
    }


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


def test_version_1_loads_with_a_file_for_each_site():
    dataset = load_dataset(GOLDEN, "golden-per-site", verify="full")
    assert dataset.offsets.tolist() == [0, 2, 4, 6, 8]
    assert dataset.manifest.site_widths == (4, 6)
    rows = golden_rows("golden-per-site")
    spec = make_spec(rows, **DATASETS["golden-per-site"])
    for number, site in enumerate(spec.sites):
        assert np.array_equal(dataset.site(site), site_values(rows, spec, number))


@pytest.mark.parametrize("name", DATASETS)
def test_their_digests_are_what_they_were(name):
    assert digests(load_dataset(GOLDEN, name).manifest) == DIGESTS[name]


@pytest.mark.parametrize("name", DATASETS)
def test_the_writer_still_writes_the_same_content(tmp_path, name):
    manifest = write_golden(tmp_path, name)
    assert manifest.content_sha256 == DIGESTS[name]["content"]


@pytest.mark.parametrize("name", DATASETS)
def test_they_are_small(name):
    files = (GOLDEN / "datasets" / name).iterdir()
    assert sum(path.stat().st_size for path in files) < 20_000


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name in DATASETS:
        sys.stdout.write(f"{name!r}: {digests(write_golden(GOLDEN, name))!r},\n")

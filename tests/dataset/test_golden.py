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

from wllm_ray.dataset.manifest import TraceSpec
from wllm_ray.dataset.reader import load_dataset
from wllm_ray.dataset.store import open_store

pytestmark = pytest.mark.requirement("D-1", "D-3")

GOLDEN = Path(__file__).parent / "golden/v1"
# One file of all sites for each shard, and one file for each site; Arrow; traces; each dtype.
DATASETS = {
    "golden": {"position": "all_prompt", "sites": ("embed", "L3_mlp_out")},
    "golden-per-site": {
        "position": "index:0,-1",
        "sites": ("embed", "L2_attn_out_prelinear"),
        "site_widths": (4, 6),
    },
    "golden-arrow": {
        "position": "first",
        "sites": ("embed", "L3_mlp_out"),
        "shard_format": "arrow",
        "storage_dtype": "native",
        "dtype": "bfloat16",
        "described": {"engine_dtype": "bfloat16"},
    },
    "golden-trace": {
        "position": "mean_prompt",
        "sites": ("L2_attn_out_prelinear", "embed"),
        "site_widths": (6, 4),
        "shard_format": "arrow",
        "storage_dtype": "float16",
        "dtype": "float16",
        "trace": TraceSpec(
            sites=("embed", "L2_attn_out_prelinear", "final_norm"), site_widths=(4, 6, 4)
        ),
    },
}
DIGESTS = {
    "golden": {
        "content": "cbeee790e609e4c235828f78832d32148f808ee364672203551e0bf90626a124",
        "manifest": "b8e626cc09a4576cdd6620369f2f0295c40c0ea6c100bbc311dd2b113b7ef6f5",
        "features": [
            "f687a5dffc295aeb33e8f369a23e827f03c91ef107fb693994e77c6a52b0f5e4",
            "b6bb75a8294b0c08c68114793d9ac3b1612bcb104aca9d49810c7c1ff1eb9074",
        ],
        "rows": [
            "711e5c53e70c04e73fbd519b55ae8f3fd68d8a084fa81fe535f837486ae9b25f",
            "2613e89e4186949851e522537fb8a98e9d306a1f2707826a380e4e9cf510da67",
        ],
        "traces": [],
    },
    "golden-per-site": {
        "content": "154efa1bdea9a04427cb7979ea1e53201bb3699154a4333d5850b411ae4a4947",
        "manifest": "4c75fa29d3117a0ff05343823318eaf278c0285f55f6165f24b7c0babbaa067f",
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
        "traces": [],
    },
    "golden-arrow": {
        "content": "51a8854c18a28ac72c73a88091b22cfa44253566155ba171eb0be9f84f6aa685",
        "manifest": "a4dcbb4d7950ac927c24b922c09f86923906bca87d98cb8ccee241d68513f254",
        "features": [
            "c92889add1358b5436b5b52fa8214ffbe1bee43b872201fcb65ed17f9ba28751",
            "a150fc71f0f1509d5d4551d57bb18dad7b83e4f180f474f638e761308c0f9478",
        ],
        "rows": [
            "711e5c53e70c04e73fbd519b55ae8f3fd68d8a084fa81fe535f837486ae9b25f",
            "2613e89e4186949851e522537fb8a98e9d306a1f2707826a380e4e9cf510da67",
        ],
        "traces": [],
    },
    "golden-trace": {
        "content": "4bc2824900b3d9d09292527604a711e3787f00085b9f3e0a311dcb86a59ae229",
        "manifest": "850d0d55a61f60b8ce958899912e6323c0c9da637440709ca0e735d948cc1974",
        "features": [
            "5f8c8c86e5c823d3f0c0ca922d00b0fb0913bed6e68c50f902f2195b79b013c6",
            "2857291db2ec5c19efe499203fd58d2e075ed393ba5b7fbf7f7c384d79742d21",
            "08f441c0ec5b50caa92135e4b938d5ef5781de4eb07463fa8372baa40f814b90",
            "6153088f76139ea1291ca54d0ed8516428c07ee8cafa6a0599ea6a109c1b6b47",
        ],
        "rows": [
            "e376e2a47e092efd22ecfa39339024ac5d19d60719241da2c7e2d746550f5bbc",
            "921803aba4d968de648046d7d75231cef27526ee5b1a65d17ceb83beb68c0962",
        ],
        "traces": [
            "5f1002b10cec69ff4fef6b29ad6bb73ddeabd6670a956c8c0430e2554864fc31",
            "75b9be6a0850761aebbb04fe86205cdef99b701beb4851b99413ffd1229537b0",
        ],
    },
}


def golden_rows(name):
    return make_rows(5, failed=[FAILED_ROW], sites=DATASETS[name]["sites"])


def spec_of(name, rows):
    options = {key: value for key, value in DATASETS[name].items() if key != "described"}
    return make_spec(rows, **options)


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
        "traces": [one.sha256 for shard in manifest.shards if (one := shard.trace_file)],
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
    spec = spec_of("golden-per-site", rows)
    for number, site in enumerate(spec.sites):
        assert np.array_equal(dataset.site(site), site_values(rows, spec, number))


@pytest.mark.requirement("C-10")
def test_version_1_loads_arrow_and_bfloat16():
    dataset = load_dataset(GOLDEN, "golden-arrow", verify="full")
    rows = golden_rows("golden-arrow")
    spec = spec_of("golden-arrow", rows)
    for number, site in enumerate(spec.sites):
        assert np.array_equal(dataset.site(site), site_values(rows, spec, number))


@pytest.mark.requirement("D-9", "C-10")
def test_version_1_loads_traces_and_float16():
    """The mean over a row's tokens, in float32, then rounded; and what it is the mean of."""
    dataset = load_dataset(GOLDEN, "golden-trace", verify="full")
    rows = golden_rows("golden-trace")
    spec = spec_of("golden-trace", rows)
    good = [row for row in rows if row.failure is None]
    for site, width, number in (("embed", 4, 0), ("L2_attn_out_prelinear", 6, 1)):
        for row, found in zip(good, dataset.site(site), strict=True):
            tokens = [value_of(row.index, n, number, width) for n in range(len(row.token_ids))]
            mean = np.float32(sum(tokens) / np.float32(len(tokens)))
            assert np.array_equal(found, mean.astype(np.float16))
            assert np.array_equal(dataset.trace(row.id).sites[site], tokens)
    assert spec.trace.sites == tuple(dataset.trace("r-4").sites)


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
    assert sum(path.stat().st_size for path in files) < 30_000


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name in DATASETS:
        sys.stdout.write(f"{name!r}: {digests(write_golden(GOLDEN, name))!r},\n")

"""Datasets of format version 1, committed to the repository: they must load for ever."""

from __future__ import annotations

import json
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

from wllm_ray.dataset.format.manifest import TraceSpec
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.stores.store import open_store

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
        "content": "addc223f88357e0494f36ae30451bd0fb7485a2d81b734d69c353932bc683f6c",
        "manifest": "e08bf7e3987513dfab4cb5bde3654e4a990f43cd12b1995a58a81e69693d78d9",
        "features": [
            "f687a5dffc295aeb33e8f369a23e827f03c91ef107fb693994e77c6a52b0f5e4",
            "b6bb75a8294b0c08c68114793d9ac3b1612bcb104aca9d49810c7c1ff1eb9074",
        ],
        "rows": [
            "b491fbf010b79bf2ceb8387ba3253893bbc173f089a6ab50930a0ba8ec4e8eac",
            "b91629acb5df1fb9678b288dbfa25b2fd624dc25d8a60aaf43fc958c37507361",
        ],
        "traces": [],
    },
    "golden-per-site": {
        "content": "1f0e2dc64c5deec0e9c756099fdc73a45cdcd218328e813108123dcecf8254b3",
        "manifest": "b2e5f2c2087837114e69fce82d41c74851b24811e412bb05726b3d8a3f3f13a7",
        "features": [
            "b98f7d5b1ec9fc82b773771a952768c687f1b113a14eb8c2d9e4a103093f6ebb",
            "56cc3d48cba9a18951dedbad031d643db55f97f669bf98ab8f24dfa51567acc4",
            "2ba425152aa93dac29e264d5873657efcbdb1bcc4dd1a54ebf443dc9db133605",
            "4aac186203bfa45d93d97decbc75c28b73d76787b785465a898aa8907fbe4d22",
        ],
        "rows": [
            "27e7bce59d3d734a5a468aa9bf73e8dac8be8f34f6aa344ee7eff71a172c45bf",
            "1883c9ea229c0be6755b332278eba223307f7470312d0872ee5afdc3cc8fc519",
        ],
        "traces": [],
    },
    "golden-arrow": {
        "content": "44a506798851b7dd300e37722308205ed4edb7c99f660cc5ae4a2bbf481552cd",
        "manifest": "626aadf645c5a14b26785577b23d1055f720083f7979e39e187f2692e7b024cf",
        "features": [
            "c92889add1358b5436b5b52fa8214ffbe1bee43b872201fcb65ed17f9ba28751",
            "a150fc71f0f1509d5d4551d57bb18dad7b83e4f180f474f638e761308c0f9478",
        ],
        "rows": [
            "45fdd7421e1d59eae3daa90de68de41ec842dfe9daf602d06b98104f62a7a6d7",
            "ec8d226d4d2998900ed6420bec3946b7d2aab61c7c3442c21cb9e231f950bf1e",
        ],
        "traces": [],
    },
    "golden-trace": {
        "content": "99215f6e526148b0f42772ed7d9c583aa2366bf3f17ddcca5fd61da802f812da",
        "manifest": "cc2f05d094c8dc6b9808c271e1a6589ece97bc93cf10b8eb90ae4a74ffa1b4e4",
        "features": [
            "5f8c8c86e5c823d3f0c0ca922d00b0fb0913bed6e68c50f902f2195b79b013c6",
            "2857291db2ec5c19efe499203fd58d2e075ed393ba5b7fbf7f7c384d79742d21",
            "08f441c0ec5b50caa92135e4b938d5ef5781de4eb07463fa8372baa40f814b90",
            "6153088f76139ea1291ca54d0ed8516428c07ee8cafa6a0599ea6a109c1b6b47",
        ],
        "rows": [
            "61a0b2db40d19654a68775f43f643648b734716d15fde499bfeb437c2f292ae9",
            "a10c38f0b46192983ed324efa69603473b07dc074addd191abd29b9e9d721bdc",
        ],
        "traces": [
            "5f1002b10cec69ff4fef6b29ad6bb73ddeabd6670a956c8c0430e2554864fc31",
            "75b9be6a0850761aebbb04fe86205cdef99b701beb4851b99413ffd1229537b0",
        ],
    },
}


def golden_rows(name):
    asked = DATASETS[name]
    return make_rows(5, failed=[FAILED_ROW], sites=asked["sites"], position=asked["position"])


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
def test_the_writer_still_writes_the_same_bytes(tmp_path, name):
    """All files but for how long the writing took, and what depends on that.

    The bytes of tables are those of one Arrow release too; with another, hold each file that
    differs against FORMAT.md, and write the golden datasets anew only if it is right.
    """
    write_golden(tmp_path, name)
    old, new = (files_of(root / "datasets" / name) for root in (GOLDEN, tmp_path))
    assert new == old


def files_of(path):
    """File → bytes; of documents that say how long something took, JSON text without that."""
    found = {file.name: file.read_bytes() for file in path.iterdir()}
    for name, data in found.items():
        if name == "manifest.json" or name.endswith(".receipt.json"):
            document = json.loads(data)
            document.pop("manifest_sha256", None)
            for part in (document, *document.get("shards", ())):
                # Of the manifest's entries, the receipt's digest covers its timings.
                part.pop("timings", None)
                part.pop("receipt_sha256", None)
            found[name] = json.dumps(document)  # in the order of the file
    return found


@pytest.mark.parametrize("name", DATASETS)
def test_they_are_small(name):
    files = (GOLDEN / "datasets" / name).iterdir()
    assert sum(path.stat().st_size for path in files) < 30_000


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    for name in DATASETS:
        sys.stdout.write(f"{name!r}: {digests(write_golden(GOLDEN, name))!r},\n")

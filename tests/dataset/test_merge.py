"""Several datasets become one, shard by shard, without a value changing."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dataset_builders import (
    FAILED_ROW,
    capture,
    features_of,
    make_rows,
    make_spec,
    rows_of,
    stage_all,
    write_dataset,
)

from wllm_ray.dataset.format.manifest import TraceSpec
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.reading.verify import verify_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.dataset.tools.merge import merge_datasets
from wllm_ray.dataset.writing.writer import commit_manifest, create_spec, orphans, stage_shard
from wllm_ray.digest import sha256_hex
from wllm_ray.errors import ConflictError, IntegrityError, InvalidInputError, NotFoundError

pytestmark = pytest.mark.requirement("D-3", "L-4")

HERE = Path(__file__).parent
TRACE = TraceSpec(sites=("embed", "L1_mlp_out"), site_widths=(4, 4))
SHAPES = {
    "stacked": {},
    "ragged, a file per site": {
        "sites": ("embed", "L1_mlp_out"),
        "site_widths": (4, 6),
        "position": "all_prompt",
    },
    "arrow, narrow": {
        "shard_format": "arrow",
        "storage_dtype": "native",
        "dtype": "bfloat16",
        "described": {"engine_dtype": "bfloat16"},
    },
    "traced": {"sites": ("L1_mlp_out",), "trace": TRACE},
}


def named(prefix, count, failed=()):
    """Rows whose ids no other dataset has."""
    return [
        replace(
            row,
            id=f"{prefix}{row.index}",
            request_digest=sha256_hex(f"{prefix}{row.index}".encode()),
        )
        for row in make_rows(count, failed=failed)
    ]


def two(store, **options):
    """Two datasets; in the first a row has failed, in the second all rows of a shard."""
    first = write_dataset(store, named("a", 5, [FAILED_ROW]), dataset_id="a", **options)
    second = write_dataset(store, named("b", 4, [0, 1, 2]), dataset_id="b", **options)
    return first, second


def files(manifest, role):
    return [e.sha256 for shard in manifest.shards for e in shard.files if e.role == role]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_rows_of_both_in_order(store, root, shape):
    first, second = two(store, **SHAPES[shape])
    before = {key: store.get(key) for key, _ in store.list("datasets")}
    seen = []
    made = merge_datasets(root, ["a", "b"], "ab", on_bytes=lambda *one: seen.append(one))
    assert (made.rows, made.rows_failed, len(made.shards)) == (9, 4, 4)
    assert files(made, "features") == files(first, "features") + files(second, "features")
    assert [shard.first_row for shard in made.shards] == [0, 3, 5, 8]
    assert seen[-1] == (first.bytes + second.bytes,) * 2
    assert verify_dataset(root, "ab").ok
    assert {key: store.get(key) for key in before} == before
    datasets = [load_dataset(root, name) for name in ("a", "b", "ab")]
    a, b, ab = datasets
    assert ab.row_ids == a.row_ids + b.row_ids == ["a0", "a2", "a3", "a4", "b3"]
    assert ab.metadata == a.metadata + b.metadata
    for site in ab.manifest.sites:
        assert np.array_equal(ab.site(site), np.concatenate([a.site(site), b.site(site)]))
    assert all(map(np.array_equal, ab.token_ids, a.token_ids + b.token_ids))


def test_receipts_and_digests_of_rows_are_the_sources_own(store, root):
    first, second = two(store)
    made = merge_datasets(root, ["b", "a"], "ba")
    for shard, source in zip(made.shards, second.shards + first.shards, strict=True):
        for name in ("rows_sha256", "requests_sha256", "timings", "recaptured", "feature_rows"):
            assert getattr(shard, name) == getattr(source, name)
    assert made.versions == first.versions
    assert made.selftest == first.selftest
    assert made.fingerprint == first.fingerprint


def test_one_dataset_under_another_id_and_root_has_the_same_content(store, root, tmp_path):
    """The digest says what was asked and measured: not where it lies or how it is called."""
    first, _ = two(store)
    made = merge_datasets(root, ["a"], "copy", to_root=tmp_path / "other")
    assert made.content_sha256 == first.content_sha256
    assert verify_dataset(tmp_path / "other", "copy").ok


@pytest.mark.requirement("D-4")
def test_again_and_twice_at_once_make_one_dataset(store, root):
    two(store)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda _: merge_datasets(root, ["a", "b"], "ab"), range(4)))
    before = store.list("datasets")
    assert merge_datasets(root, ["a", "b"], "ab") == made[0]
    assert len({one.manifest_sha256 for one in made}) == 1
    assert store.list("datasets") == before
    assert orphans(store, "ab") == []


@pytest.mark.requirement("D-4", "D-5")
def test_a_merge_that_was_killed_is_finished_by_running_it_again(tmp_path):
    """Before its spec, two files and a receipt of each of four shards, and its manifest."""
    two(open_store(tmp_path / "sources"))
    expected = merge_datasets(tmp_path / "sources", ["a", "b"], "ab", to_root=tmp_path / "never")
    finished = subprocess.run(
        [sys.executable, str(HERE / "merge_kill.py"), str(tmp_path / "sources"), str(tmp_path)],
        stdout=subprocess.PIPE,
        check=True,
        timeout=120,
        env={"PYTHONPATH": f"{HERE}:{HERE.parents[1]}"},
    )
    points = [json.loads(line) for line in finished.stdout.splitlines()]
    assert [point["survived"] for point in points] == [None] * (1 + 4 * 3 + 1) + [True]
    assert [point["found"] for point in points] == [None] * (len(points) - 1) + [5]
    assert {point["manifest"] for point in points} == {expected.manifest_sha256}
    assert all(point["sound"] for point in points)


# --- what cannot be merged ------------------------------------------------------------------------


def refused(store, match, code, kind=ConflictError, sources=("a", "b"), **options):
    before = store.list("datasets")
    with pytest.raises(kind, match=match) as error:
        merge_datasets(store, list(sources), options.pop("into", "ab"), **options)
    assert error.value.code == code
    assert store.list("datasets") == before
    return error.value


UNLIKE = {
    "position": ({"position": "first"}, r"position is last_prompt and first"),
    "sites": ({"sites": ("L2_resid_post",)}, r"sites is \('L1_resid_post',\) and"),
    "limits": ({"per_shard": 2}, "max_rows_per_shard is 3 and 2"),
    "format": ({"shard_format": "arrow"}, "shard_format is npy and arrow"),
    "layout": ({"shard_layout": "per_site"}, "shard_layout is stacked and per_site"),
    "dtype": ({"storage_dtype": "float16", "dtype": "float16"}, "dtype is float32 and float16"),
}


@pytest.mark.parametrize("field", UNLIKE)
def test_datasets_that_were_asked_for_different_things(store, field):
    changes, match = UNLIKE[field]
    write_dataset(store, named("a", 4), dataset_id="a")
    write_dataset(store, named("b", 4), dataset_id="b", **changes)
    refused(
        store, f"datasets 'a' and 'b' were not asked for the same .*{match}", "dataset_conflict"
    )


@pytest.mark.requirement("D-7")
def test_unlike_engines_meet_on_request_only(store, root):
    write_dataset(store, named("a", 4), dataset_id="a")
    write_dataset(store, named("b", 4), dataset_id="b", described={"engine_version": "2"})
    refused(store, r"'a' and 'b' come from engines .*\(engine_version\)", "mixed_fingerprints")
    made = merge_datasets(root, ["a", "b"], "ab", mixed_fingerprints=True)
    assert made.reproducibility == "mixed"
    assert [shard.fingerprint and shard.fingerprint.engine_version for shard in made.shards] == [
        None,
        None,
        "2",
        "2",
    ]
    assert verify_dataset(root, "ab").ok
    write_dataset(store, named("c", 4), dataset_id="c")
    again = merge_datasets(root, ["ab", "c"], "abc")
    assert again.mixed_fingerprints


def test_a_row_id_in_two_datasets(store):
    write_dataset(store, named("a", 4), dataset_id="a")
    write_dataset(store, named("a", 6), dataset_id="b")
    error = refused(store, r"row id 'a0' is in dataset 'a' and in 'b' \(4 such", "dataset_conflict")
    assert error.details == {"row_ids": ["a0", "a1", "a2", "a3"], "count": 4}


def test_what_is_not_there_or_not_committed(store):
    two(store)
    create_spec(store, make_spec(make_rows(3), dataset_id="c"))
    refused(store, "'x'", "dataset_not_found", NotFoundError, ("a", "x"))
    refused(store, "begun but not committed", "dataset_not_found", NotFoundError, ("a", "c"))


@pytest.mark.parametrize(
    ("sources", "into", "match"),
    [
        (["a", "a"], "ab", "found 'a' twice"),
        (["a", "b"], "b", "found 'b' twice"),
        ([], "ab", "found none"),
        (["a", "b"], "../x", "a dataset id starts with"),
    ],
)
def test_ids_that_cannot_be(store, sources, into, match):
    two(store)
    refused(store, match, "invalid_argument", InvalidInputError, sources, into=into)


def test_an_id_that_stands_for_something_else(store):
    two(store)
    write_dataset(store, make_rows(4), dataset_id="ab")
    refused(store, "committed and cannot change", "dataset_immutable")
    stage_all(store, make_spec(make_rows(4), dataset_id="other"), make_rows(4))
    refused(store, "was begun with another request", "dataset_conflict", into="other")


@pytest.mark.requirement("D-6")
@pytest.mark.parametrize("role", ["features", "rows", "trace"])
def test_a_damaged_source_is_found_while_it_is_read(store, role):
    _, second = two(store, **SHAPES["traced"])
    entry = next(e for e in second.shards[1].files if e.role == role)
    key = f"datasets/b/{entry.name}"
    whole = store.get(key)
    data = bytearray(whole)
    data[-9 if role == "features" else len(data) // 2] ^= 1
    store.put(key, bytes(data), mode="overwrite")
    with pytest.raises(IntegrityError, match=f"{key}: expected SHA-256") as error:
        merge_datasets(store, ["a", "b"], "ab")
    with pytest.raises(NotFoundError):
        load_dataset(store, "ab")
    # Rows are read before anything is written; for the rest it is told how to go on.
    begun = store.size("datasets/ab/spec.json") is not None
    assert begun == (role != "rows") == ("'ab' was begun under" in error.value.message)
    if begun:
        assert f"wllm gc {store.uri} ab --abandon" in error.value.message
        assert error.value.code == "digest_mismatch"
        store.put(key, whole, mode="overwrite")
        assert merge_datasets(store, ["a", "b"], "ab").rows == 9
        assert verify_dataset(store, "ab").ok


def test_a_damaged_receipt_of_a_source(store):
    two(store)
    key = "datasets/b/shard-00000.receipt.json"
    store.put(key, store.get(key).replace(b'"engine"', b'"Engine"'), mode="overwrite")
    refused(store, "not the one that the manifest was made from", "digest_mismatch", IntegrityError)


@pytest.mark.requirement("L-4", "D-3")
def test_one_dataset_is_copied_to_another_root_under_its_own_id(tmp_path):
    here, there = open_store(tmp_path / "here"), open_store(tmp_path / "there")
    original = write_dataset(here, make_rows(5, failed=[1]), dataset_id="a")
    copied = merge_datasets(here, ["a"], "a", to_root=there)
    assert copied.content_sha256 == original.content_sha256
    assert verify_dataset(there, "a").ok


@pytest.mark.requirement("L-4", "D-3")
def test_another_capture_of_the_same_rows_is_not_taken_for_this_one(store):
    """In class tolerance the same rows may have other bytes."""
    rows = make_rows(5)
    write_dataset(store, rows, dataset_id="a")
    spec = make_spec(rows, dataset_id="b")
    create_spec(store, spec)
    for shard in range(len(spec.shards)):
        part = rows_of(spec, rows, shard)
        other = {row.index: features_of(row, spec) * np.float32(1.5) for row in part}
        stage_shard(store, spec, shard, part, [capture(part, spec, features=other)])
    commit_manifest(store, "b")
    merge_datasets(store, ["a"], "m")
    with pytest.raises(ConflictError, match="the same rows, captured another time") as error:
        merge_datasets(store, ["b"], "m")
    assert error.value.code == "dataset_conflict"
    features = load_dataset(store, "m").features
    assert np.array_equal(features, load_dataset(store, "a").features)

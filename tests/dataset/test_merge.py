"""Several datasets become one, shard by shard, without a value changing."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from dataset_builders import (
    FAILED_ROW,
    capture,
    features_of,
    make_rows,
    make_spec,
    orphans,
    rows_of,
    stage_all,
    write_dataset,
)
from forging import Forgery, cell, table

from wllm_ray.dataset.format.manifest import TraceSpec
from wllm_ray.dataset.reading import maps
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.reading.verify import verify_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.dataset.tools.merge import merge_datasets
from wllm_ray.dataset.writing.writer import commit_manifest, create_spec, stage_shard
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
        row._replace(
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
    "position": (
        {"position": "first"},
        r"position is 'last_prompt' and 'first'\)\S+ .*Capture one of them again",
    ),
    "sites": ({"sites": ("L2_resid_post",)}, r"sites is \('L1_resid_post',\) and"),
    "traces": (
        {"trace": TraceSpec(sites=("L1_resid_post",), site_widths=(4,))},
        r"trace is None and TraceSpec\(.{1,30}\)\), so they .* Capture one of them again",
    ),
    "limits": ({"per_shard": 2}, "max_rows_per_shard is 3 and 2"),
    "format": ({"shard_format": "arrow"}, "shard_format is 'npy' and 'arrow'"),
    "layout": ({"shard_layout": "per_site"}, "shard_layout is 'stacked' and 'per_site'"),
    "dtype": ({"storage_dtype": "float16", "dtype": "float16"}, "dtype is 'float32' and 'float16'"),
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


class OtherAnswer:
    """A root that answers the n-th read of a key with other bytes, and all others truly."""

    def __init__(self, store, key, number, change):
        self._store, self._key, self.left, self._change = store, key, number, change
        self.uri = store.uri

    def __getattr__(self, name):
        return getattr(self._store, name)

    def local_path(self, _key):
        return None

    def get(self, key, **options):
        data = self._store.get(key, **options)
        if key == self._key:
            self.left -= 1
            data = data if self.left else self._change(data)
        return data


# Bytes of one row that no other file has as they are here: token ids, a vector that nobody asked
# for, one that was asked for.
SPOTS = {
    "rows": np.int32([4, 5, 6]).tobytes(),
    "trace": (np.float32(1030) + np.arange(4, dtype=np.float32) / 8).tobytes(),
    "features": (np.float32(1031) + np.arange(4, dtype=np.float32) / 8).tobytes(),
}
SPOTTED = {"sites": ("embed",), "trace": TRACE, "per_shard": 5}


def spoilt(role):
    def change(data):
        at = data.index(SPOTS[role])
        return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]

    return change


def key_of(manifest, role, shard=0):
    entry = next(e for e in manifest.shards[shard].files if e.role == role)
    return f"datasets/{manifest.dataset_id}/{entry.name}"


def refusal(call):
    try:
        call()
    except IntegrityError as error:
        return error
    return None


@pytest.mark.requirement("D-6")
@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("role", SPOTS)
@pytest.mark.parametrize("first", [True, False], ids=["as it is", "renumbered"])
def test_what_is_copied_is_what_was_checked_whichever_read_is_answered_wrongly(
    store, role, number, first
):
    """A second answer may differ from the first, so no read is believed for another one's sake."""
    target = open_store("memory://right")
    one = write_dataset(store, named("a", 5), dataset_id="a", **SPOTTED)
    two = write_dataset(store, named("b", 5), dataset_id="b", **SPOTTED)
    key = key_of(one if first else two, role)
    liar = OtherAnswer(store, key, number, spoilt(role))
    into = f"{role}-{number}-{first}-{type(store).__name__}"
    error = refusal(lambda: merge_datasets(liar, ["a", "b"], into, to_root=target))
    # Whoever reads so often hears of it; who does not is not concerned.
    assert (error is not None) == (liar.left <= 0)
    if error:
        assert error.code == "digest_mismatch"
        assert f"{key}: expected SHA-256" in error.message
        merge_datasets(liar, ["a", "b"], into, to_root=target)
    assert verify_dataset(target, into).ok
    made = load_dataset(target, into)
    sources = [load_dataset(store, name) for name in ("a", "b")]
    assert np.array_equal(made.features, np.concatenate([each.features for each in sources]))
    assert all(map(np.array_equal, made.token_ids, sources[0].token_ids + sources[1].token_ids))
    for row_id in ("a4", "b4"):
        source = sources[row_id == "b4"]
        assert np.array_equal(
            made.trace(row_id).sites["embed"], source.trace(row_id).sites["embed"]
        )


@pytest.mark.requirement("D-6")
@pytest.mark.parametrize("role", SPOTS)
def test_a_local_source_that_changes_in_place_while_it_is_copied(
    local, tmp_path, monkeypatch, role
):
    """It is changed when the first file of the shard is about to be written."""
    monkeypatch.setattr(maps, "MAPPED_FROM", 1)
    source = write_dataset(local, named("b", 5), dataset_id="b", **SPOTTED)
    first = write_dataset(local, named("a", 5, range(5)), dataset_id="a", **SPOTTED)
    assert not first.shards[0].feature_rows
    path = local.local_path(key_of(source, role))
    whole = path.read_bytes()
    target = open_store(tmp_path / "other")
    real = target.put_content

    def put_content(prefix, suffix, data):
        if prefix.endswith("shard-00001-"):
            with path.open("r+b") as file:
                file.write(spoilt(role)(whole))
        return real(prefix, suffix, data)

    monkeypatch.setattr(target, "put_content", put_content)
    if role == "features":
        merge_datasets(local, ["a", "b"], "ab", to_root=target)
    else:
        with pytest.raises(IntegrityError, match=f"{path.name}: expected SHA-256") as error:
            merge_datasets(local, ["a", "b"], "ab", to_root=target)
        assert error.value.code == "digest_mismatch"
        monkeypatch.undo()
    path.write_bytes(whole)
    merge_datasets(local, ["a", "b"], "ab", to_root=target)
    assert verify_dataset(target, "ab").ok
    assert np.array_equal(load_dataset(target, "ab").features, load_dataset(local, "b").features)


@pytest.mark.requirement("D-6")
@pytest.mark.parametrize("role", SPOTS)
def test_bytes_that_are_lost_on_their_way_into_the_new_dataset(local, tmp_path, monkeypatch, role):
    """What stays as it is has the digest that it had."""
    source = write_dataset(local, named("a", 5), dataset_id="a", **SPOTTED)
    target = open_store(tmp_path / "other")
    real = target.put_content

    def put_content(prefix, suffix, data):
        spoils = suffix == "." + key_of(source, role).partition(".")[2]
        return real(prefix, suffix, spoilt(role)(bytes(data)) if spoils else data)

    monkeypatch.setattr(target, "put_content", put_content)
    with pytest.raises(IntegrityError, match=f"{key_of(source, role)}: expected SHA-256") as error:
        merge_datasets(local, ["a"], "copy", to_root=target)
    assert error.value.code == "digest_mismatch"
    assert not [key for key, _ in target.list("datasets") if "receipt" in key]


@pytest.mark.requirement("D-5")
def test_damage_of_the_new_dataset_is_not_blamed_on_a_source(store):
    """Of a file that is staged already, and of one that is committed."""
    two(store)
    made = merge_datasets(store, ["a", "b"], "ab")
    key = key_of(made, "features")
    store.put(key, spoilt_end(store.get(key)), mode="overwrite")
    for state in ("committed", "begun"):
        with pytest.raises(IntegrityError, match=f"{key}: expected SHA-256") as error:
            merge_datasets(store, ["a", "b"], "ab")
        assert "mend the source" not in error.value.message
        assert "was begun under" not in error.value.message
        assert ("The dataset is committed" in error.value.message) == (state == "committed")
        store.delete("datasets/ab/manifest.json")


def spoilt_end(data):
    return data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]


def test_the_command_that_gives_up_can_be_pasted_whatever_the_root_is_called(tmp_path):
    root = tmp_path / "my data's"
    _, second = two(open_store(root))
    path = root / key_of(second, "features", shard=1)
    path.write_bytes(spoilt_end(path.read_bytes()))
    with pytest.raises(IntegrityError, match="was begun under") as error:
        merge_datasets(root, ["a", "b"], "ab")
    command = re.search("`(.*)`", error.value.message)[1]
    assert shlex.split(command)[:4] == ["wllm", "gc", str(root), "ab"]


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


@pytest.mark.requirement("D-6", "D-2")
@pytest.mark.parametrize(
    ("lie", "code", "match"),
    [
        ("a manifest that its receipts do not give", "rows_inconsistent", "so it was edited"),
        ("other tokens than the rows digest has", "digest_mismatch", "token_sha256"),
        ("metadata in another spelling", "table_invalid", "another spelling"),
    ],
)
def test_a_source_whose_digests_are_right_and_that_lies_all_the_same(local, lie, code, match):
    """A reader takes it, and a merge would make it true: so it looks as closely as `verify`."""
    two(local)
    forgery = Forgery(local.local_path("datasets/a"))
    if lie.startswith("a manifest"):
        forgery.manifest["versions"]["numpy"] = "9"
        forgery.seal_manifest()
    else:
        tokens = lie.startswith("other tokens")
        change = cell("token_ids", 0, [9, 9]) if tokens else cell("metadata", 0, '{"a": 1}')
        forgery.forge("rows", table(change))
        forgery.seal()
    load_dataset(local, "a").failures  # noqa: B018 (it is read)
    refused(local, match, code, IntegrityError)


@pytest.mark.requirement("D-7")
def test_another_engine_with_the_same_values_is_not_taken_for_this_one(store):
    """Its fingerprint is part of what was measured, and so of the content digest."""
    rows = named("a", 5)
    one = write_dataset(store, rows, dataset_id="a")
    other = write_dataset(store, rows, dataset_id="b", described={"engine_version": "2"})
    assert files(one, "features") == files(other, "features")
    merge_datasets(store, ["a"], "m")
    match = "shard 0 of 'b' holds the same rows, captured another time .* or another engine"
    refused(store, match, "dataset_conflict", sources=["b"], into="m")

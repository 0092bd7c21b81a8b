"""Spec, stage, commit: once each, whoever tries, however often."""

from __future__ import annotations

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
    orphans,
    rows_of,
    stage_all,
    value_of,
    write_dataset,
)

from tests.fakes import Application, FakeEngine, fake_description
from wllm_ray.capture.model_files import resolve_model
from wllm_ray.dataset.format.layout import ROWS_SUFFIX
from wllm_ray.dataset.format.manifest import document_bytes
from wllm_ray.dataset.reading import staged
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.dataset.writing import writer
from wllm_ray.dataset.writing.writer import (
    commit_manifest,
    create_spec,
    load_spec,
    stage_shard,
    staged_shards,
)
from wllm_ray.errors import ConflictError, IntegrityError, NotFoundError, RowsFailedError
from wllm_ray.records import RowFailure
from wllm_ray.requests import read_request

pytestmark = pytest.mark.requirement("D-4")

LOST = RowFailure.of("replica_lost", "gone")


@pytest.fixture
def rows():
    return make_rows(8, failed=[FAILED_ROW])


@pytest.fixture
def spec(rows):
    return make_spec(rows)


def stage(store, spec, rows, shard, **options):
    part = rows_of(spec, rows, shard)
    return stage_shard(store, spec, shard, part, [capture(part, spec, **options)])


def test_spec_is_created_once(store, spec):
    assert create_spec(store, spec) is True
    assert create_spec(store, spec) is False
    assert load_spec(store, "d") == spec


NOTHING = {"fields": {}, "shards": [], "more_shards": 0, "rows": [], "more_rows": 0}


def refused(store, asked, rows):
    with pytest.raises(ConflictError) as error:
        create_spec(store, asked, rows_of=lambda shard: rows_of(asked, rows, shard))
    return error.value


def test_a_conflict_names_the_shards_of_which_no_row_is_staged(store, spec, rows):
    create_spec(store, spec)
    changed = [*rows[:4], rows[4]._replace(request_digest="0" * 64), *rows[5:]]
    error = refused(store, make_spec(changed), changed)
    assert error.code == "dataset_conflict"
    assert "was begun with another request; what differs: shards [1]. Use" in error.message
    assert error.details == NOTHING | {"shards": [1]}
    assert load_spec(store, "d") == spec


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("position", "first", "position (stored 'last_prompt', asked 'first')"),
        (
            "sites",
            ("L0_resid_post",),
            "sites[0] (stored 'L1_resid_post', asked 'L0_resid_post')",
        ),
        ("max_rows_per_shard", 4, "max_rows_per_shard (stored 3, asked 4)"),
    ],
)
def test_a_conflict_over_a_field_names_it_alone(store, rows, name, value, said):
    """Shards, and the digests of their rows, differ only because the field does."""
    kept = getattr(write_dataset(store, rows), name)
    if name == "max_rows_per_shard":
        asked, changed = make_spec(rows, per_shard=value), rows
    else:
        changed = [row._replace(request_digest=f"{row.index:064}") for row in rows]
        asked = make_spec(changed, **{name: value})
    error = refused(store, asked, changed)
    assert f"what differs: field {said}. Use another dataset id" in error.message
    assert error.details == NOTHING | {"fields": {name: {"stored": kept, "asked": value}}}


@pytest.mark.requirement("L-6")
def test_a_conflict_lists_twenty_and_counts_the_others(store):
    rows = make_rows(50)
    write_dataset(store, rows, per_shard=2)
    changed = [row._replace(request_digest=f"{row.index:064}") for row in rows]
    error = refused(store, make_spec(changed, per_shard=2), changed)
    ids = [row.id for row in rows[:20]]
    assert error.details == {
        "fields": {},
        "shards": list(range(20)),
        "more_shards": 5,
        "rows": ids,
        "more_rows": 30,
    }
    assert f"shards {list(range(20))} and 5 more, rows {ids} and 30 more. Use" in error.message


@pytest.mark.requirement("L-6")
def test_an_inserted_row_is_named_and_those_behind_it_are_not(store):
    """They are in other shards than before, but the same."""
    rows = make_rows(9)
    inserted = [row._replace(index=n) for n, row in enumerate([rows[8], *rows[:8]])]
    write_dataset(store, rows[:8])
    error = refused(store, make_spec(inserted), inserted)
    assert error.details["shards"] == [0, 1, 2]
    assert error.details["rows"] == [rows[8].id]


@pytest.mark.requirement("L-6")
def test_rows_in_a_shard_that_was_not_stored_are_named(store):
    rows = make_rows(8)
    write_dataset(store, rows[:6])
    error = refused(store, make_spec(rows), rows)
    assert error.details["rows"] == [rows[6].id, rows[7].id]


@pytest.mark.requirement("L-6")
def test_a_conflict_names_the_staged_rows_that_differ(store, spec, rows):
    create_spec(store, spec)
    stage(store, spec, rows, 1)
    changed = [*rows[:4], rows[4]._replace(request_digest="0" * 64), *rows[5:]]
    asked = make_spec(changed)
    with pytest.raises(ConflictError, match=r"shards \[1\], rows \['r-4'\]") as error:
        create_spec(store, asked, rows_of=lambda shard: rows_of(asked, changed, shard))
    assert error.value.details["rows"] == ["r-4"]


def test_a_conflict_names_rows_that_changed_places(store, rows):
    spec = make_spec(rows)
    create_spec(store, spec)
    stage(store, spec, rows, 1)
    moved = list(rows)
    moved[3], moved[4] = (rows[4]._replace(index=3), rows[3]._replace(index=4))
    asked = make_spec(moved)
    with pytest.raises(ConflictError) as error:
        create_spec(store, asked, rows_of=lambda shard: rows_of(asked, moved, shard))
    assert error.value.details["rows"] == [rows[3].id, rows[4].id]


def test_appended_rows_to_a_committed_dataset(store, rows):
    write_dataset(store, rows)
    with pytest.raises(ConflictError, match="is committed and cannot change") as error:
        create_spec(store, make_spec(make_rows(10, failed=[FAILED_ROW])))
    assert error.value.code == "dataset_immutable"
    assert error.value.details["fields"] == {"rows": {"stored": 8, "asked": 10}}
    assert error.value.details["shards"] == [2, 3]


def test_no_dataset_begun(store):
    for call in (load_spec, commit_manifest):
        with pytest.raises(NotFoundError, match="no dataset 'd' was begun"):
            call(store, "d")


def test_staging_twice_is_a_success_that_changes_nothing(store, spec, rows):
    create_spec(store, spec)
    first = stage(store, spec, rows, 0)
    before = store.list("datasets")
    again = stage(store, spec, rows, 0)
    assert (first.created, first.superseded) == (True, False)
    assert (again.created, again.superseded) == (False, False)
    assert again.receipt == first.receipt
    assert store.list("datasets") == before


@pytest.mark.requirement("D-3")
def test_the_first_receipt_stands_and_the_second_is_told(store, spec, rows):
    create_spec(store, spec)
    first = stage(store, spec, rows, 0)
    other = stage(store, spec, rows, 0, features={0: value_of(99)[None]})
    assert (other.created, other.superseded) == (False, True)
    assert other.receipt == first.receipt
    (orphan,) = orphans(store, "d")
    assert orphan[0].startswith("shard-00000-")
    assert orphan[0].endswith(".npy")


@pytest.mark.requirement("D-10")
def test_nothing_is_written_while_a_transient_failure_is_left(store, spec, rows):
    create_spec(store, spec)
    part = rows_of(spec, rows, 0)
    first = capture(part, spec, failures={2: LOST})
    result = stage_shard(store, spec, 0, part, [first])
    assert (result.receipt, result.transient, result.created) == (None, {2: LOST}, False)
    assert [key for key, _ in store.list("datasets")] == ["datasets/d/spec.json"]
    retried = stage_shard(store, spec, 0, part, [first, capture(part[2:], spec)])
    whole = stage(open_store("memory://whole"), spec, rows, 0)
    assert retried.receipt.files == whole.receipt.files
    assert retried.receipt.timings["engine"] == 0.5


@pytest.mark.requirement("D-5", "D-10")
def test_commit_needs_every_receipt(store, spec, rows):
    create_spec(store, spec)
    stage(store, spec, rows, 1)
    with pytest.raises(RowsFailedError, match=r"2 of 3 shards have no receipt yet \(0, 2\)") as e:
        commit_manifest(store, "d")
    assert e.value.details == {"missing_shards": [0, 2]}
    assert set(staged_shards(store, spec)) == {1}
    for shard in (0, 2):
        stage(store, spec, rows, shard)
    assert commit_manifest(store, "d").rows == 8


def test_commit_twice_is_one_dataset(store, rows):
    first = write_dataset(store, rows)
    before = store.list("datasets")
    assert commit_manifest(store, "d") == first
    assert store.list("datasets") == before


def test_a_shard_without_a_good_row_is_a_shard(store):
    rows = make_rows(6, failed=[0, 1, 2])
    manifest = write_dataset(store, rows)
    assert manifest.shape == (3, 1, 4)
    assert manifest.shards[0].features_files[0].bytes == 128
    assert manifest.fingerprint is not None
    assert manifest.selftest is not None


def test_no_good_row_at_all(store):
    rows = make_rows(2, failed=[0, 1])
    spec = make_spec(rows)
    create_spec(store, spec)
    stage_shard(store, spec, 0, rows, [])
    manifest = commit_manifest(store, "d")
    assert (manifest.shape, manifest.rows_ok, manifest.fingerprint) == ((0, 1, 4), 0, None)


@pytest.mark.requirement("D-7")
def test_mixed_fingerprints_are_not_committed(store, spec, rows):
    create_spec(store, spec)
    for shard, device in ((0, "cpu"), (1, "cpu"), (2, "gpu")):
        stage(store, spec, rows, shard, device=device)
    with pytest.raises(ConflictError, match=r"shard 2 comes from .* \(device\)") as error:
        commit_manifest(store, "d")
    assert error.value.code == "mixed_fingerprints"


DAMAGE = {
    "size_mismatch": lambda data: data[:-1],
    "digest_mismatch": lambda data: data[:-1] + bytes([data[-1] ^ 1]),
}


@pytest.mark.requirement("D-5")
@pytest.mark.parametrize("code", ["size_mismatch", "digest_mismatch", "file_missing"])
@pytest.mark.parametrize("suffix", [".npy", ".rows.arrow"])
def test_resuming_over_a_damaged_file_fails_closed(store, spec, code, suffix):
    stage_all(store, spec, make_rows(8, failed=[FAILED_ROW]))
    key = next(k for k, _ in store.list("datasets") if k.endswith(suffix) and "00001" in k)
    if code == "file_missing":
        store.delete(key)
    else:
        store.put(key, DAMAGE[code](store.get(key)), mode="overwrite")
    with pytest.raises(IntegrityError, match=key) as error:
        staged_shards(store, spec)
    assert error.value.code == code
    if code != "digest_mismatch":
        with pytest.raises(IntegrityError, match=key):
            commit_manifest(store, "d")


@pytest.mark.requirement("D-5")
def test_resuming_over_a_damaged_receipt_fails_closed(store, spec, rows):
    stage_all(store, spec, rows)
    key = "datasets/d/shard-00001.receipt.json"
    store.put(key, b"{", mode="overwrite")
    with pytest.raises(IntegrityError, match=key) as error:
        staged_shards(store, spec)
    assert error.value.code == "manifest_invalid"


def test_a_receipt_of_a_shard_that_does_not_exist(store, spec, rows):
    stage_all(store, spec, rows)
    store.put("datasets/d/shard-00009.receipt.json", b"{}")
    with pytest.raises(IntegrityError, match="the spec does not have"):
        staged_shards(store, spec)


def test_the_manifest_of_another_dataset_stands(store, spec, rows):
    """Even one of the same content: no reader would open it under this id."""
    write_dataset(store, rows, dataset_id="other")
    stage_all(store, spec, rows)
    store.put("datasets/d/manifest.json", store.get("datasets/other/manifest.json"))
    for call in (commit_manifest, lambda *_: staged_shards(store, spec)):
        with pytest.raises(IntegrityError, match="rename it back to datasets/other") as error:
            call(store, "d")
        assert error.value.code == "rows_inconsistent"


RECEIPT = "datasets/d/shard-00001.receipt.json"
COMMITTED = "committed, so nothing of it is captured again: .* under another dataset id"


def spoilt(store, key, code):
    """Lose a receipt, or have it say something else."""
    data = store.get(key)
    store.delete(key)
    if code == "digest_mismatch":  # a whole receipt, as a second capture would give
        store.put(key, data.replace(b'"engine":0.25', b'"engine":0.75'))


@pytest.mark.requirement("D-5")
@pytest.mark.parametrize("code", ["file_missing", "digest_mismatch"])
def test_a_committed_dataset_with_another_receipt_is_damaged_and_never_staged_again(
    store, spec, rows, code
):
    write_dataset(store, rows)
    spoilt(store, RECEIPT, code)
    before = store.list("datasets")
    for call in (lambda: staged_shards(store, spec), lambda: commit_manifest(store, "d")):
        with pytest.raises(IntegrityError, match=f"{RECEIPT}.*{COMMITTED}") as error:
            call()
        assert error.value.code == code
        assert "remove" not in error.value.message
    if code == "file_missing":
        with pytest.raises(IntegrityError, match=f"{RECEIPT}.*{COMMITTED}"):
            stage(store, spec, rows, 1)
    assert store.list("datasets") == before


@pytest.mark.requirement("D-4")
def test_a_commit_that_lost_the_race_to_other_receipts_is_told(store, spec, rows, monkeypatch):
    """The manifest appears, made from another receipt, after this committer has looked for it."""
    stage_all(store, spec, rows)
    receipt, looks = store.get(RECEIPT), []

    def standing(*given):
        looks.append(given)
        return None if len(looks) == 1 else staged.standing_manifest(*given)

    commit_manifest(store, "d")
    store.put(RECEIPT, receipt.replace(b'"engine":0.25', b'"engine":0.75'), mode="overwrite")
    monkeypatch.setattr(writer, "standing_manifest", standing)
    with pytest.raises(IntegrityError, match=RECEIPT) as error:
        commit_manifest(store, "d")
    assert (error.value.code, len(looks)) == ("digest_mismatch", 2)


@pytest.mark.requirement("D-5")
def test_a_committed_dataset_without_its_spec_is_not_begun_anew(store, spec, rows):
    write_dataset(store, rows)
    store.delete("datasets/d/spec.json")
    for asked in (spec, make_spec(rows, position="first")):
        with pytest.raises(IntegrityError, match=f"spec.json: it is missing.*{COMMITTED}") as error:
            create_spec(store, asked)
        assert error.value.code == "file_missing"
    assert store.size("datasets/d/spec.json") is None


@pytest.mark.requirement("D-5")
def test_a_committed_dataset_with_another_spec_is_damaged(store, spec, rows):
    write_dataset(store, rows)
    other = make_spec(rows, position="first")
    store.put("datasets/d/spec.json", document_bytes(other), mode="overwrite")
    calls = (
        lambda: create_spec(store, spec),
        lambda: staged_shards(store, other),
        lambda: commit_manifest(store, "d"),
    )
    for call in calls:
        with pytest.raises(IntegrityError, match=r"spec\.json: it is not the one") as error:
            call()
        assert error.value.code == "digest_mismatch"


@pytest.mark.requirement("D-5")
@pytest.mark.parametrize("code", ["size_mismatch", "digest_mismatch", "file_missing"])
def test_the_advice_on_a_damaged_file_differs_once_it_is_committed(store, spec, rows, code):
    stage_all(store, spec, rows)
    key = next(k for k, _ in store.list("datasets") if k.endswith(".npy") and "00001" in k)
    data = store.get(key)
    store.delete(key)
    if code != "file_missing":
        store.put(key, DAMAGE[code](data))
    with pytest.raises(
        IntegrityError,
        match="or remove the shard's receipt while no job is running, to capture it again",
    ):
        staged_shards(store, spec)
    store.put(key, data, mode="overwrite")
    commit_manifest(store, "d")
    store.delete(key)
    if code != "file_missing":
        store.put(key, DAMAGE[code](data))
    with pytest.raises(IntegrityError, match=f"{key}.*{COMMITTED}") as error:
        staged_shards(store, spec)
    assert error.value.code == code
    assert "remove" not in error.value.message


def test_many_threads_one_dataset(store, rows):
    with ThreadPoolExecutor(4) as pool:
        manifests = list(pool.map(lambda _: write_dataset(store, rows), range(4)))
    assert len({manifest.manifest_sha256 for manifest in manifests}) == 1
    assert orphans(store, "d") == []


def test_many_processes_one_dataset(tmp_path):
    program = (
        "import sys\n"
        "from dataset_builders import FAILED_ROW, make_rows, write_dataset\n"
        "from wllm_ray.dataset.stores.store import open_store\n"
        "rows = make_rows(8, failed=[FAILED_ROW])\n"
        "print(write_dataset(open_store(sys.argv[1]), rows).manifest_sha256)\n"
    )
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    children = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path)],
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": ":".join(paths)},
        )
        for _ in range(3)
    ]
    digests = {child.communicate(timeout=120)[0] for child in children}
    assert [child.returncode for child in children] == [0, 0, 0]
    assert digests == {commit_manifest(open_store(tmp_path), "d").manifest_sha256.encode() + b"\n"}
    assert not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.requirement("D-2", "D-3")
def test_the_content_digest_is_of_the_content_alone(store, rows):
    base = write_dataset(store, rows)
    renamed = write_dataset(store, rows, dataset_id="renamed")
    one_by_one = make_spec(rows, dataset_id="chunked")
    create_spec(store, one_by_one)
    for shard in (2, 0, 1):
        part = rows_of(one_by_one, rows, shard)
        chunks = [capture([row], one_by_one) for row in reversed(part) if row.failure is None]
        stage_shard(store, one_by_one, shard, part, chunks)
    chunked = commit_manifest(store, "chunked")
    assert base.content_sha256 == renamed.content_sha256 == chunked.content_sha256
    assert len({base.manifest_sha256, renamed.manifest_sha256, chunked.manifest_sha256}) == 3
    different = (
        write_dataset(store, rows, dataset_id="x1", per_shard=4),
        write_dataset(store, rows, dataset_id="x2", position="first"),
        write_dataset(store, make_rows(8), dataset_id="x3"),
        write_dataset(store, rows, dataset_id="x4", sites=("L2_resid_post",)),
    )
    assert len({base.content_sha256, *(one.content_sha256 for one in different)}) == 5


@pytest.mark.requirement("D-2")
def test_the_manifest_says_which_model_engine_and_versions(store, rows):
    manifest = write_dataset(store, rows)
    assert manifest.model.revision == "a" * 40
    assert manifest.model.requested_revision == "main"
    assert manifest.reproducibility == "bitwise"
    assert manifest.measured_relative_l2 == 0.0
    assert manifest.versions == {"numpy": "2", "wllm_ray": "0"}
    assert set(manifest.shards[0].timings) == {"engine", "stage"}
    assert manifest.shards[1].versions is None  # as the manifest's own


@pytest.mark.requirement("D-2")
def test_a_shard_of_another_replica_keeps_its_own_self_test(store, spec, rows):
    create_spec(store, spec)
    for shard in range(3):
        part = rows_of(spec, rows, shard)
        chunk = capture(part, spec)
        selftest = chunk.description.selftest.model_copy(update={"seconds": float(shard)})
        described = chunk.description.model_copy(update={"selftest": selftest})
        stage_shard(store, spec, shard, part, [replace(chunk, description=described)])
    manifest = commit_manifest(store, "d")
    seconds = [shard.selftest and shard.selftest.seconds for shard in manifest.shards]
    assert (manifest.selftest.seconds, seconds) == (0.0, [None, 1.0, 2.0])


@pytest.mark.requirement("D-2")
@pytest.mark.parametrize("measured", [(0.25, 0.5, 0.125), (None, 0.125, None), (None, None, None)])
def test_the_bound_of_a_dataset_is_the_largest_of_its_replicas(store, spec, rows, measured):
    create_spec(store, spec)
    for shard, bound in enumerate(measured):
        part = rows_of(spec, rows, shard)
        chunk = capture(part, spec)
        selftest = chunk.description.selftest.model_copy(update={"measured_relative_l2": bound})
        described = chunk.description.model_copy(
            update={"selftest": None if bound is None else selftest}
        )
        stage_shard(store, spec, shard, part, [replace(chunk, description=described)])
    largest = max((bound for bound in measured if bound is not None), default=None)
    assert commit_manifest(store, "d").measured_relative_l2 == largest


@pytest.mark.requirement("D-2")
def test_positions_that_were_captured_again_are_counted(store, spec, rows):
    """Over all chunks of a shard."""
    create_spec(store, spec)
    for shard in range(3):
        part = rows_of(spec, rows, shard)
        chunks = [
            replace(capture([row], spec), recaptured=10 * shard + at)
            for at, row in enumerate(part)
            if row.failure is None
        ]
        receipt = stage_shard(store, spec, shard, part, chunks).receipt
        assert receipt.recaptured == sum(chunk.recaptured for chunk in chunks)
    # Row 1 failed before it ran.
    assert [shard.recaptured for shard in commit_manifest(store, "d").shards] == [2, 33, 41]


class Keeping:
    """A store that keeps what it is given to write, as it is given."""

    def __init__(self, store) -> None:
        self._store = store
        self.written = {}

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put_content(self, prefix, suffix, data):
        self.written[suffix] = data
        return self._store.put_content(prefix, suffix, data)


@pytest.mark.requirement("R-2")
@pytest.mark.parametrize("shard_format", ["npy", "arrow"])
@pytest.mark.parametrize(
    "shape",
    [
        {"sites": ("embed", "L2_mlp_out")},
        {"sites": ("embed",), "site_widths": (6,), "shard_layout": "per_site"},
    ],
)
def test_an_array_of_all_columns_is_written_from_the_memory_that_was_captured(
    store, rows, shard_format, shape
):
    spec = make_spec(rows, per_shard=8, shard_format=shard_format, **shape)
    chunks = [capture(part, spec) for part in (rows[:5], rows[5:])]
    keeping = Keeping(store)
    create_spec(store, spec)
    stage_shard(keeping, spec, 0, rows, chunks)
    (parts,) = (data for suffix, data in keeping.written.items() if suffix != ROWS_SUFFIX)
    captured = [
        chunk for part in parts for chunk in chunks if np.shares_memory(part, chunk.features)
    ]
    assert sum(map(len, parts)) > sum(chunk.features.nbytes for chunk in chunks)
    assert captured == chunks


PRIVATE = "somebody"


@pytest.mark.requirement("D-2")
@pytest.mark.parametrize("persistence", ["dataset", "full_trace"])
async def test_no_document_holds_a_path_or_prompt(tmp_path, persistence):
    """Nor does any other file: from the request on, with a model out of somebody's folder."""
    model = tmp_path / PRIVATE / "models/tiny"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    identity = resolve_model(str(model))
    root = tmp_path / f"root-of-{PRIVATE}"
    wrong = RowFailure.of("non_finite", "not a number")
    fingerprint = fake_description().fingerprint
    fingerprint = fingerprint.model_copy(update={"model_revision": identity.revision})
    named = {"model": identity, "served_model_name": "tiny", "fingerprint": fingerprint}
    engine = FakeEngine(
        fake_description(**named),
        fault=lambda row: wrong if row.index == 1 else None,
    )
    app = Application(open_store(root), engine=engine)
    prompts = [f"{PRIVATE}'s text {n}" for n in range(4)]
    content = [{"prompt": text} for text in prompts]
    content += [{"messages": [{"role": "user", "content": f"{PRIVATE}'s words"}]}]
    content += [{"prompt": f"{PRIVATE} goes on " * 9}]  # longer than the model takes
    content += [{"messages": [{"role": PRIVATE, "content": PRIVATE}]}]  # refused by the template
    rows = [{"id": f"r{n}", **one, "metadata": {"n": n}} for n, one in enumerate(content)]
    request = {"model": "tiny", "rows": rows, "layers": [1], "rows_per_shard": 3}
    asked = read_request(request | {"persistence": persistence, "dataset_id": "d"})
    answer = await app.service.extract_dataset(asked)
    assert (answer.dataset.rows, answer.dataset.rows_failed) == (7, 3)
    assert load_dataset(root, "d").manifest.model == identity
    for path in root.rglob("*"):
        assert PRIVATE not in str(path.relative_to(root))
        if path.is_file():
            data = path.read_bytes()
            assert PRIVATE.encode() not in data, path.name
            assert str(tmp_path).encode() not in data, path.name
    assert b'"name":"tiny"' in (root / "datasets/d/manifest.json").read_bytes()


@pytest.mark.requirement("D-5")
def test_a_damaged_file_under_the_standing_receipt_is_told(store, spec, rows):
    """This attempt's bytes are others, so they do not heal the file of the first."""
    create_spec(store, spec)
    entry = stage(store, spec, rows, 0).receipt.features_files[0]
    store.put(f"datasets/d/{entry.name}", b"x" * entry.bytes, mode="overwrite")
    with pytest.raises(IntegrityError, match=entry.name) as error:
        stage(store, spec, rows, 0, features={0: value_of(99)[None]})
    assert error.value.code == "digest_mismatch"


def test_the_spec_of_another_dataset(store, spec):
    create_spec(store, spec)
    store.put("datasets/e/spec.json", store.get("datasets/d/spec.json"))
    with pytest.raises(IntegrityError, match="is that of 'd'; rename the folder back to 'd'"):
        load_spec(store, "e")


# --- one file for each site -----------------------------------------------------------------------


@pytest.fixture
def per_site(rows):
    sites = ("embed", "L1_attn_out_prelinear", "L2_mlp_out")
    return make_spec(rows, position="all_prompt", sites=sites, site_widths=(4, 6, 4))


@pytest.mark.requirement("D-3", "D-7")
def test_the_same_values_of_another_engine_are_told(store, spec, rows):
    """The content digest has the fingerprint in it."""
    create_spec(store, spec)
    first = stage(store, spec, rows, 0)
    other = stage(store, spec, rows, 0, engine_version="2")
    assert other.receipt == first.receipt
    assert (other.created, other.superseded) == (False, True)
    assert orphans(store, "d") == []


def test_every_site_has_a_file_of_its_own(store, per_site, rows):
    stage_all(store, per_site, rows)
    receipts = staged_shards(store, per_site)
    names = {key.rpartition("/")[2] for key, _ in store.list("datasets")}
    for receipt in receipts.values():
        assert [entry.site for entry in receipt.features_files] == list(per_site.sites)
        assert {entry.name for entry in receipt.files} <= names
    assert orphans(store, "d") == []
    assert stage(store, per_site, rows, 0).created is False
    assert commit_manifest(store, "d").shape == (20, 3, None)


@pytest.mark.requirement("D-3")
@pytest.mark.parametrize("site", [0, 1, 2])
def test_other_bytes_of_any_site_are_told(store, per_site, rows, site):
    create_spec(store, per_site)
    first = stage(store, per_site, rows, 0)
    values = features_of(rows[2], per_site)
    values[-1, sum(per_site.site_widths[: site + 1]) - 1] += 1
    other = stage(store, per_site, rows, 0, features={2: values})
    assert (other.created, other.superseded, other.receipt) == (False, True, first.receipt)
    (orphan,) = orphans(store, "d")
    assert orphan[0].endswith(f".{per_site.sites[site]}.npy")


@pytest.mark.requirement("D-5")
@pytest.mark.parametrize("site", ["embed", "L1_attn_out_prelinear", "L2_mlp_out"])
@pytest.mark.parametrize("code", ["size_mismatch", "digest_mismatch", "file_missing"])
def test_resuming_over_one_damaged_site_fails_closed(store, per_site, rows, site, code):
    stage_all(store, per_site, rows)
    key = next(k for k, _ in store.list("datasets") if k.endswith(f".{site}.npy") and "00001" in k)
    data = store.get(key)
    store.delete(key)
    if code != "file_missing":
        store.put(key, DAMAGE[code](data))
    with pytest.raises(IntegrityError, match=key) as error:
        staged_shards(store, per_site)
    assert error.value.code == code


@pytest.mark.requirement("D-2", "D-3")
def test_layout_is_part_of_the_content_and_chunking_is_not(store, rows):
    asked = {"sites": ("embed", "L2_mlp_out"), "position": "index:0,-1"}
    stacked = write_dataset(store, rows, dataset_id="stacked", **asked)
    spec = make_spec(rows, dataset_id="split", shard_layout="per_site", **asked)
    create_spec(store, spec)
    for shard in (2, 0, 1):
        part = rows_of(spec, rows, shard)
        chunks = [capture([row], spec) for row in reversed(part) if row.failure is None]
        stage_shard(store, spec, shard, part, chunks)
    split = commit_manifest(store, "split")
    again = write_dataset(store, rows, dataset_id="again", shard_layout="per_site", **asked)
    assert split.content_sha256 == again.content_sha256 != stacked.content_sha256

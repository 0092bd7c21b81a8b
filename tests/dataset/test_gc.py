"""What dead attempts leave is found and removed; what any record names, or may name, never is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from dataset_builders import (
    FAILED_ROW,
    capture,
    make_rows,
    make_spec,
    rows_of,
    stage_all,
    value_of,
    write_dataset,
)

from wllm_ray.dataset.format.layout import manifest_key, receipt_key, spec_key
from wllm_ray.dataset.reading.files import list_datasets
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.reading.verify import verify_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.dataset.tools.abandon import abandon_dataset
from wllm_ray.dataset.tools.gc import collect_garbage
from wllm_ray.dataset.tools.inspect import inspect_dataset
from wllm_ray.dataset.tools.merge import merge_datasets
from wllm_ray.dataset.writing import writer
from wllm_ray.dataset.writing.writer import commit_manifest, create_spec, stage_shard
from wllm_ray.errors import ConflictError, NotFoundError

pytestmark = pytest.mark.requirement("D-5")

TOMORROW = datetime.now(UTC) + timedelta(days=2)
HEX = "0123456789abcdef"


@pytest.fixture
def rows():
    return make_rows(6, failed=[FAILED_ROW])


def collected(root, dataset_id="d", **options):
    (report,) = collect_garbage(root, dataset_id, **({"now": TOMORROW} | options))
    return report


def keys(store):
    return [key for key, _ in store.list("datasets")]


def superseded(store, spec, rows):
    """Stage a shard twice, with other bytes; returns the key of the file that lost."""
    before = set(keys(store))
    stage(store, spec, rows, 0, features={0: value_of(99)[None]})
    (lost,) = set(keys(store)) - before
    return lost


def stage(store, spec, rows, shard, **options):
    part = rows_of(spec, rows, shard)
    return stage_shard(store, spec, shard, part, [capture(part, spec, **options)])


def test_nothing_is_left_over_where_nothing_went_wrong(store, root, rows):
    write_dataset(store, rows)
    report = collected(root)
    assert (report.state, report.staged, report.shards) == ("committed", 2, 2)
    assert report.leftovers == ()
    assert report.damage is None


def test_what_an_attempt_left_is_removed_and_nothing_else(store, root, rows):
    spec = make_spec(rows)
    stage_all(store, spec, rows)
    lost = superseded(store, spec, rows)
    commit_manifest(store, "d")
    whole = set(keys(store)) - {lost}
    extra = {
        "datasets/d/.tmp-host-1-1": "temporary",
        f"datasets/d/shard-00001-{HEX}.L0_resid_pre.npy": "superseded",
        f"datasets/d/shard-00007-{HEX}.rows.arrow": "superseded",
        "datasets/d/notes.txt": "foreign",
        "datasets/d/sub/.tmp-host-1-1": "foreign",
    }
    for key in extra:
        store.put(key, b"four")
    expected = extra | {lost: "superseded"}
    listed = collected(root)
    assert {one.key: one.kind for one in listed.leftovers} == expected
    assert not any(one.removed for one in listed.leftovers)
    assert set(keys(store)) == whole | expected.keys()
    removed = collected(root, delete=True)
    assert sum(one.bytes for one in removed.leftovers if one.removed) == 12 + sum(
        one.bytes for one in listed.leftovers if one.key == lost
    )
    foreign = {key for key, kind in expected.items() if kind == "foreign"}
    assert set(keys(store)) == whole | foreign
    assert [one.key for one in collected(root, delete=True).leftovers] == sorted(foreign)
    assert verify_dataset(root, "d").ok


def test_what_is_younger_than_asked_is_left(store, root, rows):
    write_dataset(store, rows)
    store.put("datasets/d/.tmp-host-1-1", b"four")
    (young,) = collected(root, delete=True, now=None).leftovers
    assert (young.recent, young.removed) == (True, False)
    (old,) = collected(root, delete=True, now=None, older_than=timedelta(0)).leftovers
    assert (old.recent, old.removed) == (False, True)
    assert collected(root).leftovers == ()


def test_files_of_a_shard_without_a_receipt_may_have_a_writer(store, root, rows):
    """It is about to create the receipt that names them, whatever their age."""
    spec = make_spec(rows)
    create_spec(store, spec)
    stage(store, spec, rows, 0)
    stage(store, spec, rows, 1)
    store.delete(receipt_key("d", 1))
    before = keys(store)
    report = collected(root, delete=True)
    assert (report.state, report.staged, report.shards) == ("begun", 1, 2)
    assert report.leftovers == ()
    assert keys(store) == before
    stage(store, spec, rows, 1)
    commit_manifest(store, "d")
    assert verify_dataset(root, "d").ok


def test_a_committer_at_work_loses_nothing(store, root, rows):
    """Garbage is collected between every two writes of a job."""
    spec = make_spec(rows)
    collecting, writing = open_store(root), store.put

    def put(*args, **options):
        list(collect_garbage(collecting, None, delete=True, now=TOMORROW))
        return writing(*args, **options)

    create_spec(store, spec)
    store.put = put
    stage_all(store, spec, rows)
    stage(store, spec, rows, 0, features={0: value_of(99)[None]})
    commit_manifest(store, "d")
    assert load_dataset(root, "d", verify="full").row_ids


DAMAGES = {
    "a flipped bit in the manifest": (manifest_key("d"), "manifest_invalid"),
    "a flipped bit in the spec": (spec_key("d"), "manifest_invalid"),
    "a flipped bit in a receipt": (receipt_key("d", 1), "digest_mismatch"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_nothing_is_removed_from_a_damaged_dataset(store, root, rows, damage):
    key, code = DAMAGES[damage]
    write_dataset(store, rows)
    store.put("datasets/d/.tmp-host-1-1", b"four")
    store.put(key, b"[" + store.get(key)[1:], mode="overwrite")
    before = keys(store)
    report = collected(root, delete=True)
    assert (report.state, report.damage.code, report.leftovers) == ("damaged", code, ())
    assert keys(store) == before


@pytest.mark.parametrize("gone", ["spec", "receipt", "features", "the spec, uncommitted"])
def test_nothing_is_removed_where_a_file_is_missing(store, root, rows, gone):
    """What looks left over may be the missing file under another name."""
    entry = write_dataset(store, rows).shards[1].files[0]
    if "uncommitted" in gone:
        store.delete(manifest_key("d"))
    key = {"receipt": receipt_key("d", 1), "features": f"datasets/d/{entry.name}"}.get(
        gone, spec_key("d")
    )
    store.put("datasets/d/.tmp-moved", store.get(key))
    store.delete(key)
    report = collected(root, delete=True)
    assert report.damage.code == "file_missing"
    assert key in report.damage.message
    assert "datasets/d/.tmp-moved" in keys(store)


def test_a_whole_root(store, root, rows):
    write_dataset(store, rows, dataset_id="whole")
    create_spec(store, make_spec(rows, dataset_id="begun"))
    store.put("datasets/never/.tmp-host-1-1", b"four")
    store.put("datasets/.hidden/x", b"")
    store.put("datasets/file", b"")
    store.put("runs/whole/summary.json", b"{}")
    reports = list(collect_garbage(root, delete=True, now=TOMORROW))
    assert [(one.dataset_id, one.state) for one in reports] == [
        ("begun", "begun"),
        ("never", "unknown"),
        ("whole", "committed"),
    ]
    assert [one.dataset_id for one in collect_garbage(root, now=TOMORROW)] == ["begun", "whole"]
    with pytest.raises(NotFoundError, match="no file of a dataset 'never' lies under"):
        collected(root, "never")


def test_a_removal_that_was_interrupted_goes_on(store, root, rows):
    write_dataset(store, rows)
    for number in range(3):
        store.put(f"datasets/d/.tmp-host-1-{number}", b"four")
    deleting = store.delete

    def once(key):
        deleting(key)
        raise KeyboardInterrupt

    store.delete = once
    with pytest.raises(KeyboardInterrupt):
        list(collect_garbage(store, "d", delete=True, now=TOMORROW))
    report = collected(root, delete=True)
    assert sum(one.removed for one in report.leftovers) == 2


# --- giving up ------------------------------------------------------------------------------------


@pytest.fixture
def begun(store, rows):
    spec = make_spec(rows)
    create_spec(store, spec)
    stage(store, spec, rows, 0)
    store.put("datasets/d/.tmp-host-1-1", b"four")
    store.put("datasets/d/notes.txt", b"mine")
    return spec


def test_a_dataset_that_was_begun_can_be_given_up(store, root, rows, begun):
    before = keys(store)
    listed = abandon_dataset(root, "d", now=TOMORROW)
    assert keys(store) == before
    assert {key for key, _ in listed} == set(before) - {"datasets/d/notes.txt"}
    assert abandon_dataset(root, "d", delete=True, now=TOMORROW) == listed
    assert keys(store) == [manifest_key("d"), "datasets/d/notes.txt"]
    mark = [(manifest_key("d"), store.size(manifest_key("d")))]
    assert abandon_dataset(root, "d") == mark
    assert abandon_dataset(root, "d", delete=True, now=TOMORROW) == mark
    assert keys(store) == ["datasets/d/notes.txt"]
    write_dataset(store, make_rows(4))
    assert verify_dataset(root, "d").ok


def test_a_committed_dataset_cannot_be_given_up(store, root, rows):
    write_dataset(store, rows)
    before = keys(store)
    with pytest.raises(ConflictError, match="is committed") as error:
        abandon_dataset(root, "d", delete=True, now=TOMORROW)
    assert error.value.code == "dataset_immutable"
    assert keys(store) == before


def test_a_writer_that_may_be_at_work_is_not_disturbed(store, root, begun):
    before = keys(store)
    with pytest.raises(ConflictError, match=r"a writer may be at work; stop it, .*--older-than 0"):
        abandon_dataset(root, "d", delete=True)
    assert keys(store) == before
    assert abandon_dataset(root, "d", delete=True, older_than=timedelta(0))


def test_no_empty_folder_is_left(store, root, rows):
    spec = make_spec(rows)
    create_spec(store, spec)
    stage(store, spec, rows, 0)
    if (path := store.local_path("datasets/d")) is not None:
        assert path.is_dir()
    for _ in range(2):
        abandon_dataset(root, "d", delete=True, now=TOMORROW)
    assert path is None or not path.exists()
    write_dataset(store, rows)
    assert verify_dataset(root, "d").ok


def test_who_commits_first_has_committed(store, root, rows, begun):
    """The job finishes between the look at the folder and the mark."""
    stage(store, begun, rows, 1)
    putting = store.put

    def put(*args, **options):
        store.put = putting
        commit_manifest(store, "d")
        return putting(*args, **options)

    store.put = put
    with pytest.raises(ConflictError, match="nothing was removed"):
        abandon_dataset(store, "d", delete=True, now=TOMORROW)
    assert verify_dataset(root, "d").ok


def test_who_gives_up_first_has_given_up(store, root, rows, begun):
    """Wherever it is interrupted, nobody commits, nobody resumes, and it can go on."""
    stage(store, begun, rows, 1)
    deleting = store.delete

    def once(key):
        deleting(key)
        if key.startswith("probe-"):
            return
        store.delete = deleting
        raise KeyboardInterrupt

    for _ in keys(store)[1:]:  # all but the notes
        store.delete = once
        with pytest.raises(KeyboardInterrupt):
            abandon_dataset(store, "d", delete=True, now=TOMORROW)
        expect_given_up(store, root, begun, rows)
        if receipt_key("d", 1) not in keys(store):
            with pytest.raises(ConflictError) as error:
                stage(store, begun, rows, 1)
            assert error.value.code == "dataset_abandoned"
    assert keys(store) == [manifest_key("d"), "datasets/d/notes.txt"]
    expect_given_up(store, root, begun, rows)


def expect_given_up(store, root, spec, rows):
    """Nobody begins, commits or reads it, and everybody is told why."""
    assert manifest_key("d") in keys(store)
    assert list_datasets(store) == []
    assert collected(root).state == "abandoned"
    for call in (lambda: create_spec(store, spec), lambda: commit_manifest(store, "d")):
        with pytest.raises(ConflictError, match=r"was given up .* `wllm gc ROOT d --ab") as error:
            call()
        assert error.value.code == "dataset_abandoned"
    for read in (load_dataset, verify_dataset, inspect_dataset):
        with pytest.raises(NotFoundError, match="begun, and given up before it was committed"):
            read(root, "d")
    with pytest.raises(NotFoundError, match="given up before"):
        merge_datasets(root, ["d"], "copy")


def test_a_committer_that_was_slow_is_told_however_long_it_took(store, root, rows, begun):
    """It has looked at every file; then all is given up, to the last file, before it commits."""
    stage(store, begun, rows, 1)
    putting = store.put

    def put(key, *args, **options):
        if key == manifest_key("d"):
            store.put = putting
            assert abandon_dataset(root, "d", delete=True, older_than=timedelta(0))
        return putting(key, *args, **options)

    store.put = put
    with pytest.raises(ConflictError, match="was given up") as error:
        commit_manifest(store, "d")
    assert error.value.code == "dataset_abandoned"
    expect_given_up(store, root, begun, rows)


def test_what_a_writer_stages_while_all_is_given_up_goes_too(store, root, rows, begun):
    """A receipt that outlived its files would be in the way of whoever begins again."""
    deleting = store.delete

    def delete(key):
        deleting(key)
        if key.endswith("spec.json"):
            store.delete = deleting
            stage(store, begun, rows, 1)

    store.delete = delete
    # The writer had looked for the mark already.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "expect_not_lost", lambda *_: None)
        removed = dict(abandon_dataset(store, "d", delete=True, now=TOMORROW))
    assert receipt_key("d", 1) in removed
    assert keys(store) == [manifest_key("d"), "datasets/d/notes.txt"]


def test_what_is_staged_later_still_is_removed_as_a_leftover(store, root, rows, begun):
    abandon_dataset(root, "d", delete=True, now=TOMORROW)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "expect_not_lost", lambda *_: None)
        stage(store, begun, rows, 1)
    report = collected(root, delete=True)
    kinds = {one.key.rpartition(".")[2]: (one.kind, one.removed) for one in report.leftovers}
    assert kinds["json"] == kinds["npy"] == kinds["arrow"] == ("superseded", True)
    assert kinds["txt"] == ("foreign", False)
    assert keys(store) == [manifest_key("d"), "datasets/d/notes.txt"]


def test_zero_is_no_age_whatever_the_clocks_say(store, root, rows, begun):
    """The root's clock may be ahead of ours."""
    yesterday = TOMORROW - timedelta(days=3)
    (one,) = [x for x in collected(root, now=yesterday).leftovers if x.kind == "temporary"]
    assert one.recent
    none = timedelta(0)
    kept = collected(root, delete=True, now=yesterday, older_than=none).leftovers
    assert [(x.kind, x.removed) for x in kept] == [("temporary", True), ("foreign", False)]
    with pytest.raises(ConflictError, match="a writer may be at work"):
        abandon_dataset(root, "d", delete=True, now=yesterday, older_than=timedelta(seconds=1))
    assert abandon_dataset(root, "d", delete=True, now=yesterday, older_than=none)


def test_nothing_to_give_up(root):
    with pytest.raises(NotFoundError, match="no file of a dataset 'd'"):
        abandon_dataset(root, "d", delete=True)


@pytest.mark.requirement("D-1", "L-4")
def test_all_tools_on_an_object_store(s3_root, rows):
    store = open_store(s3_root)
    write_dataset(store, rows, dataset_id="a", position="all_prompt")
    spec = make_spec(rows)
    stage_all(store, spec, rows)
    lost = superseded(store, spec, rows)
    commit_manifest(store, "d")
    create_spec(store, make_spec(rows, dataset_id="begun"))
    assert merge_datasets(s3_root, ["d"], "copy").rows == 6
    assert verify_dataset(s3_root, "copy").ok
    (young,) = collected(s3_root, delete=True, now=None).leftovers
    assert (young.key, young.recent) == (lost, True)
    assert [one.state for one in collect_garbage(s3_root, delete=True, now=TOMORROW)] == [
        "committed",
        "begun",
        "committed",
        "committed",
    ]
    assert lost not in keys(store)
    assert abandon_dataset(s3_root, "begun", delete=True, now=TOMORROW)
    assert list_datasets(store) == ["a", "copy", "d"]
    assert all(verify_dataset(s3_root, one).ok for one in ("a", "copy", "d"))

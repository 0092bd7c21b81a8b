"""What is said where a request differs from the dataset that its id stands for."""

from __future__ import annotations

import pytest
from dataset_builders import FAILED_ROW, MODEL, make_rows, make_spec, rows_of, stage_all

from wllm_ray.dataset.format.layout import folder
from wllm_ray.dataset.format.manifest import TraceSpec
from wllm_ray.dataset.writing.writer import commit_manifest, create_spec, staged_shards
from wllm_ray.errors import ConflictError

pytestmark = pytest.mark.requirement("D-4")


def refused(store, asked, rows):
    with pytest.raises(ConflictError) as error:
        create_spec(store, asked, rows_of=lambda shard: rows_of(asked, rows, shard))
    return error.value


def all_sites(*numbers):
    return tuple(f"L{number}_resid_post" for number in numbers)


def a_model(name, revision="a" * 40):
    return MODEL.model_copy(update={"name": name, "revision": revision})


LONG = "/data/models/" + "x" * 60


@pytest.mark.requirement("U-4")
@pytest.mark.parametrize(
    ("stored", "asked", "said"),
    [
        (
            {"model": a_model(f"{LONG}-7b-instruct-checkpoint-0100-{LONG}")},
            {"model": a_model(f"{LONG}-8b-instruct-checkpoint-0100-{LONG}")},
            (
                "model.name (stored …'xxxxxxxxxxx-7b-instruct-checkpoint-0100-'…, "
                "asked …'xxxxxxxxxxx-8b-instruct-checkpoint-0100-'…)"
            ),
        ),
        (
            {"model": a_model(LONG)},
            {"model": a_model(f"{LONG}-it")},
            "model.name (stored …'xxxxxxxxxxxx', asked …'xxxxxxxxxxxx-it')",
        ),
        (
            {"model": a_model("tiny", f"sha256:{'1' * 64}")},
            {"model": a_model("tiny", f"sha256:1{'2' * 63}")},
            f"model.revision (stored 'sha256:{'1' * 33}'…, asked 'sha256:1{'2' * 32}'…)",
        ),
        (
            {"model": a_model("café")},
            {"model": a_model("cafe\u0301")},
            r"model.name (stored 'caf\xe9', asked 'cafe\u0301')",
        ),
        (
            {"sites": all_sites(*range(10))},
            {"sites": all_sites(*range(7), 10, 8, 9)},
            "sites[7] (stored 'L7_resid_post', asked 'L10_resid_post')",
        ),
        (
            {"sites": all_sites(*range(10))},
            {"sites": all_sites(*range(1, 11))},
            (
                "sites[0] (stored 'L0_resid_post', asked 'L1_resid_post'), "
                "field sites[1] (stored 'L1_resid_post', asked 'L2_resid_post'), "
                "field sites[2] (stored 'L2_resid_post', asked 'L3_resid_post') and 7 more items"
            ),
        ),
        (
            {"sites": all_sites(0, 1, 2)},
            {"sites": all_sites(0, 2)},
            (
                "sites (stored length 3, asked length 2), "
                "field sites[1] (stored 'L1_resid_post', asked 'L2_resid_post'), "
                "field site_widths (stored length 3, asked length 2), "
                "field site_widths[2] (only stored: 4)"
            ),
        ),
        (
            {"sites": all_sites(0)},
            {"sites": all_sites(0, 1)},
            (
                "sites (stored length 1, asked length 2), "
                "field sites[1] (only asked: 'L1_resid_post'), "
                "field site_widths (stored length 1, asked length 2), "
                "field site_widths[1] (only asked: 4)"
            ),
        ),
        (
            {"sites": all_sites(0)},
            {"sites": all_sites(0), "trace": TraceSpec(sites=all_sites(0), site_widths=(4,))},
            "trace (stored None, asked {'site_widths': (4,), 'sites': ('L0_resid_post',)})",
        ),
    ],
)
def test_a_conflict_shows_where_two_values_part(store, stored, asked, said):
    """And not their beginnings and ends, which may be the same."""
    rows = make_rows(4)
    create_spec(store, make_spec(rows, **stored))
    error = refused(store, make_spec(rows, **asked), rows)
    assert f"what differs: field {said}. Use another dataset id" in error.message


@pytest.mark.requirement("D-5")
@pytest.mark.parametrize(
    ("damage", "code"), [("lost", "object_not_found"), ("flipped", "digest_mismatch")]
)
@pytest.mark.parametrize("committed", [True, False])
def test_rows_that_cannot_be_read_hide_no_conflict(store, damage, code, committed):
    rows = make_rows(8, failed=[FAILED_ROW])
    spec = make_spec(rows)
    stage_all(store, spec, rows)
    if committed:
        commit_manifest(store, "d")
    entry = staged_shards(store, spec)[1].rows_file
    key = f"{folder('d')}/{entry.name}"
    data = store.get(key)
    store.delete(key)
    if damage == "flipped":  # a letter of an id, which would be told as that of a row
        assert data.count("行-5".encode()) == 1
        store.put(key, data.replace("行-5".encode(), "行-6".encode()))
    changed = [row._replace(request_digest=f"{row.index:064}") for row in rows]
    error = refused(store, make_spec(changed), changed)
    assert error.code == ("dataset_immutable" if committed else "dataset_conflict")
    ids = [rows[index].id for index in (0, 1, 2, 6, 7)]
    assert (
        f"what differs: shards [0, 1, 2], rows {ids}, rows of shards [1] could not be compared "
        f"({code}). Use" in error.message
    )
    assert (error.details["rows"], error.details["unread_shards"]) == (ids, [1])

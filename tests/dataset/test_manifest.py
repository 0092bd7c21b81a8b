"""Documents that are not what they say: each kind is refused by name."""

from __future__ import annotations

import hashlib
import json
import pickle

import pytest
from dataset_builders import FAILED_ROW, make_rows, make_spec, stage_all, write_dataset
from pydantic import ValidationError

from wllm_ray.dataset.format.documents import read_manifest, read_receipt, read_spec
from wllm_ray.dataset.format.manifest import DatasetSpec, document_bytes
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.digest import canonical_json, sha256_hex
from wllm_ray.errors import IntegrityError

pytestmark = pytest.mark.requirement("D-1", "D-2", "D-6")


@pytest.fixture(scope="module")
def manifest():
    rows = make_rows(5, failed=[FAILED_ROW])
    return write_dataset(open_store("memory://manifests"), rows)


@pytest.fixture
def document(manifest):
    return json.loads(document_bytes(manifest))


def resealed(document):
    """The document with a manifest digest that is right for what it says now."""
    body = {key: value for key, value in document.items() if key != "manifest_sha256"}
    return canonical_json(body | {"manifest_sha256": sha256_hex(canonical_json(body))})


def refused(data, code, match):
    with pytest.raises(IntegrityError, match=match) as error:
        read_manifest(data)
    assert error.value.code == code


def test_what_is_written_is_read(manifest):
    assert read_manifest(document_bytes(manifest)) == manifest


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"[]", "expected a wllm_ray.manifest object, found list"),
        (b'{"format":1,"format":2}', "occurs twice"),
        (b'{"x":NaN}', "NaN is not JSON"),
        (b'{"x":Infinity}', "Infinity is not JSON"),
        (b'{"x":1e999}', "does not fit"),
    ],
)
def test_not_strict_json(data, match):
    refused(data, "manifest_invalid", match)


def test_unknown_format_and_version(document):
    for change in ({"format": "other"}, {"format_version": 2}, {"format_version": True}):
        refused(resealed(document | change), "format_unknown", "a newer wllm_ray may read it")


def test_another_kind_of_document(manifest):
    with pytest.raises(IntegrityError, match=r"expected format 'wllm_ray\.spec' version 1") as e:
        read_spec(document_bytes(manifest))
    assert e.value.code == "format_unknown"


def test_unknown_and_missing_keys_are_named(document):
    refused(resealed(document | {"extra": 1}), "manifest_invalid", "extra: Extra inputs")
    del document["axes"]
    refused(resealed(document), "manifest_invalid", "axes: Field required")


def test_wrong_types_are_named(document):
    refused(resealed(document | {"rows": "5"}), "manifest_invalid", "rows: Input should be")
    refused(resealed(document | {"rows": 5.0}), "manifest_invalid", "rows: Input should be")
    refused(resealed(document | {"shape": [4, 1]}), "manifest_invalid", r"shape\.2: Field required")


@pytest.mark.parametrize("spacing", [{"indent": 1}, {"separators": (", ", ":")}])
def test_saved_again_by_another_program(document, spacing):
    data = json.dumps(document, sort_keys=True, ensure_ascii=False, **spacing).encode()
    refused(data, "manifest_invalid", "not in canonical form")


def test_edited_by_hand(document):
    document["position"] = "first"
    refused(canonical_json(document), "digest_mismatch", "manifest_sha256 is")


def test_edited_and_sealed_again(document):
    """A careful liar is caught by the digests inside."""
    document["position"] = "first"
    refused(resealed(document), "digest_mismatch", "spec_sha256 is")


def test_content_digest_is_recomputed(document):
    document["content_sha256"] = "0" * 64
    refused(resealed(document), "digest_mismatch", "content_sha256 is")


def change_shard(document, number=0, **changes):
    document["shards"][number] |= changes
    return resealed(document)


def test_counts_must_agree(document):
    refused(resealed(document | {"rows_failed": 0}), "rows_inconsistent", "rows_failed is 0")
    refused(resealed(document | {"shape": [9, 1, 4]}), "rows_inconsistent", "shape is")
    refused(resealed(document | {"reproducibility": None}), "rows_inconsistent", "reproduc")
    refused(change_shard(document, rows_failed=9), "rows_inconsistent", "rows_failed")


@pytest.mark.parametrize(("failed", "feature_rows"), [(1, 1), (3, 1), (2, 0), (4, 2)])
def test_failures_and_feature_rows_must_agree(document, failed, feature_rows):
    document["shards"][0] |= {"rows_failed": failed, "feature_rows": feature_rows}
    document |= {"rows_failed": failed, "rows_ok": 5 - failed, "shape": [feature_rows + 2, 1, 4]}
    refused(resealed(document), "rows_inconsistent", f"{failed} of 3 rows failed")


def test_the_rows_file_is_no_array(document):
    document["shards"][0]["files"][1]["dtype"] = "<f4"
    refused(resealed(document), "rows_inconsistent", "neither shape nor dtype")


def test_shards_in_order(document):
    document["shards"].reverse()
    refused(resealed(document), "rows_inconsistent", "numbered")


def test_shards_tile_the_rows(document):
    refused(change_shard(document, 1, first_row=4), "manifest_invalid", "begins at 4, not 3")


@pytest.mark.parametrize(
    "name", ["../x.npy", "/etc/passwd", "a/b.npy", "shard-00001-0000000000000000.npy", "", "x\0"]
)
def test_file_names_are_recomputed(document, name):
    document["shards"][0]["files"][0]["name"] = name
    refused(resealed(document), "name_invalid", "expected the plain file name shard-00000-")


def test_features_entry_must_fit(document):
    files = document["shards"][0]["files"]
    files[0]["dtype"] = "|O"
    refused(resealed(document), "array_invalid", r"found \(2, 1, 4\) and '\|O'")
    files[0]["dtype"] = "<f4"
    files[0]["shape"] = [1, 2, 4]
    refused(resealed(document), "array_invalid", r"expected features of shape \(2, 1, 4\)")
    files[0]["shape"] = [2, 1, 4]
    files[0]["bytes"] += 1
    refused(resealed(document), "size_mismatch", "take 160 bytes, but 161")


def test_both_files_and_no_other(document):
    document["shards"][0]["files"].reverse()
    match = "layout stacked has the files features, rows, in this order; found rows, features"
    refused(resealed(document), "manifest_invalid", match)


# --- one file for each site -----------------------------------------------------------------------

WIDTHS = {"L0_resid_post": 4, "L1_attn_out_prelinear": 6, "L2_mlp_out": 4}


@pytest.fixture(scope="module")
def per_site_manifest():
    return write_dataset(
        open_store("memory://per-site-manifests"),
        make_rows(5, failed=[FAILED_ROW]),
        position="all_prompt",
        sites=tuple(WIDTHS),
        site_widths=tuple(WIDTHS.values()),
    )


@pytest.fixture
def per_site(per_site_manifest):
    return json.loads(document_bytes(per_site_manifest))


def test_one_file_for_each_site_and_no_width_for_all(per_site_manifest):
    assert read_manifest(document_bytes(per_site_manifest)) == per_site_manifest
    assert per_site_manifest.shape == (11, 3, None)
    for shard in per_site_manifest.shards:
        assert [entry.site for entry in shard.features_files] == list(WIDTHS)
        assert [entry.shape[1:] for entry in shard.features_files] == [(4,), (6,), (4,)]
        assert all(
            entry.name.endswith(f"-{entry.sha256[:16]}.{entry.site}.npy")
            for entry in shard.features_files
        )


def change_files(document, change):
    change(document["shards"][1]["files"])
    return resealed(document)


FILE_LIES = {
    "missing": (lambda files: files.pop(1), "found features of 'L0_resid_post', features of 'L2_"),
    "missing at the end": (lambda files: files.pop(2), "found features of 'L0_resid_post', featur"),
    "duplicated": (lambda files: files.insert(1, files[0]), "of 'L0_resid_post', features of 'L0_"),
    "one more": (
        lambda files: files.insert(3, files[2] | {"site": "L3_mlp_out"}),
        "features of 'L3_mlp_out', rows$",
    ),
    "in another order": (lambda files: files.insert(0, files.pop(1)), "found features of 'L1_attn"),
    "under another site": (
        lambda files: files[0].update(site="L2_mlp_out"),
        "found features of 'L2_mlp_out', features of 'L1_attn",
    ),
    "under a path": (lambda files: files[0].update(site="../x"), r"found features of '\.\./x'"),
    "of all sites": (lambda files: files[0].update(site=None), "found features, features of 'L1_"),
    "rows of a site": (lambda files: files[3].update(site="embed"), "rows of 'embed'$"),
    "two tables": (lambda files: files.append(files[3]), "rows, rows$"),
}


@pytest.mark.parametrize("lie", FILE_LIES)
def test_each_way_the_files_of_the_sites_can_lie(per_site, lie):
    change, match = FILE_LIES[lie]
    refused(change_files(per_site, change), "manifest_invalid", match)


def test_a_site_under_the_name_of_another(per_site):
    def swap(files):
        files[0]["name"] = files[0]["name"].replace("L0_resid_post", "L2_mlp_out")

    match = r"expected the plain file name shard-00001-\w{16}\.L0_resid_post\.npy"
    refused(change_files(per_site, swap), "name_invalid", match)


def test_a_site_of_another_width(per_site):
    def wider(files):
        files[0]["shape"] = [5, 6]

    refused(change_files(per_site, wider), "array_invalid", r"shape \(5, 4\).* found \(5, 6\)")
    files = per_site["shards"][1]["files"]
    files[0]["shape"] = [5, 4]
    files[1]["bytes"] -= 8
    refused(resealed(per_site), "size_mismatch", r"shape \(5, 6\) take 248 bytes, but 240")


def test_another_number_of_feature_rows_in_one_site(per_site):
    def shorter(files):
        files[2]["shape"] = [4, 4]

    refused(change_files(per_site, shorter), "array_invalid", r"shape \(5, 4\).* found \(4, 4\)")


def test_another_layout_or_other_widths_are_another_spec(document, per_site):
    refused(
        resealed(document | {"shard_layout": "per_site"}),
        "manifest_invalid",
        "layout per_site has the files features of 'L1_resid_post', rows, in this order",
    )
    refused(resealed(document | {"site_widths": [6]}), "rows_inconsistent", "shape is")
    refused(resealed(per_site | {"shard_layout": "stacked"}), "manifest_invalid", "be stacked")
    refused(resealed(per_site | {"shape": [11, 3, 4]}), "rows_inconsistent", "shape is")
    refused(resealed(per_site | {"site_widths": [4, 6]}), "manifest_invalid", "one width for each")


def test_receipts_belong_to_their_spec_and_shard():
    rows = make_rows(6)
    store = open_store("memory://receipts")
    spec = make_spec(rows)
    stage_all(store, spec, rows)
    data = store.get("datasets/d/shard-00000.receipt.json")
    assert read_receipt(data, spec, 0).rows == 3
    with pytest.raises(IntegrityError, match=r"expected \(shard, first row, rows\)") as error:
        read_receipt(data, spec, 1)
    assert error.value.code == "rows_inconsistent"
    other = make_spec(rows, position="first")
    with pytest.raises(IntegrityError, match="written for another spec") as error:
        read_receipt(data, other, 0)
    assert error.value.code == "digest_mismatch"


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"sites": ("block",)}, "cannot read hook site"),
        ({"sites": ("L1_block",)}, "canonical form"),
        ({"sites": ("embed", "embed")}, "listed twice"),
        ({"sites": ()}, "at least 1"),
        ({"rows": 7}, "the shards hold 6 rows, not 7"),
        ({"max_rows_per_shard": 2}, "more rows than max_rows_per_shard"),
        ({"dataset_id": "../x"}, "dataset_id"),
        ({"storage_dtype": "float16"}, "storage_dtype"),
        ({"site_widths": (0,)}, "site_widths"),
        ({"site_widths": (4, 4)}, "not one width for each site"),
        ({"site_widths": ()}, "not one width for each site"),
        (
            {"sites": ("embed", "L1_mlp_out"), "site_widths": (4, 6), "shard_layout": "stacked"},
            "cannot be stacked",
        ),
        ({"shard_layout": "auto"}, "shard_layout"),
        ({"position": "last-prompt"}, "canonical form"),
        ({"position": "index:0, -1"}, "canonical form"),
        ({"position": "index:one"}, "cannot read position"),
    ],
)
def test_a_spec_cannot_be_nonsense(changes, match):
    with pytest.raises(ValidationError, match=match):
        make_spec(make_rows(6), **changes)


@pytest.mark.requirement("D-2")
def test_a_changed_spec_has_another_digest():
    spec = make_spec(make_rows(5))
    assert spec.sha256 == hashlib.sha256(document_bytes(spec)).hexdigest()
    other = spec.model_copy(update={"dataset_id": "other"})
    assert other.sha256 == hashlib.sha256(document_bytes(other)).hexdigest() != spec.sha256
    assert pickle.loads(pickle.dumps(spec)) == spec == DatasetSpec(**spec.model_dump())

"""Documents that are not what they say: each kind is refused by name."""

from __future__ import annotations

import json

import pytest
from dataset_builders import FAILED_ROW, make_rows, make_spec, stage_all, write_dataset
from pydantic import ValidationError

from wllm_ray.dataset.documents import read_manifest, read_receipt, read_spec
from wllm_ray.dataset.manifest import document_bytes
from wllm_ray.dataset.store import open_store
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
    refused(resealed(document), "manifest_invalid", "one features file and one rows file")


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
        ({"hidden_size": 0}, "hidden_size"),
    ],
)
def test_a_spec_cannot_be_nonsense(changes, match):
    with pytest.raises(ValidationError, match=match):
        make_spec(make_rows(6), **changes)

"""FORMAT.md against the code, and the code against bytes and digests made by hand."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from dataset_builders import FAILED_ROW, make_rows, make_spec, value_of, write_dataset

import wllm_ray.dataset
from wllm_ray import digest
from wllm_ray.dataset.format.features import npy_header
from wllm_ray.dataset.format.layout import file_name, receipt_key, receipt_shard
from wllm_ray.dataset.format.manifest import DatasetSpec, Manifest, Receipt
from wllm_ray.dataset.format.rows import ROWS_SCHEMA
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.tools.folders import content_shard
from wllm_ray.errors import ROW_FAILURE_CODES

pytestmark = pytest.mark.requirement("D-1", "D-3")

FORMAT = (Path(wllm_ray.dataset.__file__).parent / "FORMAT.md").read_text(encoding="utf-8")
GOLDEN_FOLDER = Path(__file__).parent / "golden/v1"
GOLDEN = re.findall(r"^\| (\w+) \| `(.+)` \| `(.+)` \|$", FORMAT, re.MULTILINE)


def evaluate(function, argument):
    if function == "canonical_json":
        return digest.canonical_json(argument).decode()
    if function == "request_digest":
        row_id = argument.pop("id")
        return digest.request_digest(row_id=row_id, **argument)
    return getattr(digest, function)(argument)


def test_the_golden_table_covers_every_digest_function():
    names = {function for function, _, _ in GOLDEN}
    assert names == {
        "canonical_json",
        "request_digest",
        "requests_digest",
        "rows_digest",
        "token_digest",
    }


@pytest.mark.parametrize(("function", "argument", "expected"), GOLDEN)
def test_golden_values_of_the_page(function, argument, expected):
    assert evaluate(function, digest.parse_json(argument)) == expected


def test_the_page_names_every_key_column_and_code():
    keys = {*DatasetSpec.model_fields, *Receipt.model_fields, *Manifest.model_fields}
    missing = [name for name in {*keys, *ROWS_SCHEMA.names} if name not in FORMAT]
    assert missing == []
    for code, (stage, permanent, meaning) in ROW_FAILURE_CODES.items():
        kind = "permanent" if permanent else "transient"
        assert f"| `{code}` | {stage} | {kind} | {meaning} |" in FORMAT


def plain_json(value):
    """Canonical JSON of values without floats, without our code."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


ASKED = {
    "stacked": {"sites": ("L1_resid_post",)},
    "per_site": {
        "sites": ("embed", "L3_attn_out_prelinear"),
        "site_widths": (4, 6),
        "position": "index:0,-1",
    },
}


@pytest.mark.parametrize("layout", ASKED)
def test_every_digest_of_a_dataset_recomputed_with_hashlib_alone(local, tmp_path, layout):
    rows = make_rows(5, failed=[FAILED_ROW])
    asked = {"position": "last_prompt"} | ASKED[layout]
    write_dataset(local, rows, **asked)
    folder = tmp_path / "root/datasets/d"
    manifest = json.loads((folder / "manifest.json").read_bytes())
    spec_bytes = (folder / "spec.json").read_bytes()
    assert manifest["spec_sha256"] == hashlib.sha256(spec_bytes).hexdigest()

    shards = []
    for number, shard in enumerate(manifest["shards"]):
        *features, table = shard["files"]
        for entry in (*features, table):
            data = (folder / entry["name"]).read_bytes()
            assert entry["sha256"] == hashlib.sha256(data).hexdigest()
            assert entry["bytes"] == len(data)
            of_site = "" if entry["site"] is None else f".{entry['site']}"
            suffix = f"{of_site}.npy" if entry["role"] == "features" else ".rows.arrow"
            assert entry["name"] == f"shard-{number:05d}-{entry['sha256'][:16]}{suffix}"
        receipt = (folder / f"shard-{number:05d}.receipt.json").read_bytes()
        assert shard["receipt_sha256"] == hashlib.sha256(receipt).hexdigest()
        total, requests = hashlib.sha256(), hashlib.sha256()
        for row in pa.ipc.open_file(folder / table["name"]).read_all().to_pylist():
            token = None
            if row["token_ids"] is not None:
                packed = struct.pack(f"<{len(row['token_ids'])}I", *row["token_ids"])
                token = hashlib.sha256(packed).hexdigest()
                assert row["token_sha256"].hex() == token
            total.update(plain_json([row["request_sha256"].hex(), token, row["status"]]) + b"\n")
            requests.update(row["request_sha256"])
        assert shard["rows_sha256"] == total.hexdigest()
        assert shard["requests_sha256"] == requests.hexdigest()
        shards.append(
            {
                "first_row": shard["first_row"],
                "rows": shard["rows"],
                "rows_sha256": shard["rows_sha256"],
                "features_sha256": [entry["sha256"] for entry in features],
                "fingerprint": None,
            }
        )
    content = {
        "format": "wllm_ray.content/1",
        "spec": {
            "model_revision": "a" * 40,
            "tokenizer_revision": "b" * 40,
            "sites": list(asked["sites"]),
            "position": asked["position"],
            "storage_dtype": "float32",
            "dtype": "float32",
            "shard_format": "npy",
            "shard_layout": layout,
            "max_rows_per_shard": 3,
            "max_bytes_per_shard": 1 << 20,
        },
        "fingerprint": manifest["fingerprint"],
        "shards": shards,
    }
    assert manifest["content_sha256"] == hashlib.sha256(plain_json(content)).hexdigest()


def test_the_features_file_holds_the_good_rows_in_order(local, tmp_path):
    rows = make_rows(5, failed=[FAILED_ROW])
    manifest = write_dataset(local, rows)
    name = manifest.shards[0].features_files[0].name
    data = (tmp_path / "root/datasets/d" / name).read_bytes()
    expected = b"".join(value_of(index).astype("<f4").tobytes() for index in (0, 2))
    assert data == npy_header((2, 1, 4), "float32") + expected


def test_the_features_file_of_a_site_holds_that_site_alone(local, tmp_path):
    rows = make_rows(5, failed=[FAILED_ROW])
    manifest = write_dataset(local, rows, **ASKED["per_site"])
    folder = tmp_path / "root/datasets/d"
    for site, width in enumerate((4, 6)):
        expected = [
            value_of(index, position, site, width).astype("<f4").tobytes()
            for index, last in ((0, 1), (2, 3))
            for position in (0, last)
        ]
        data = (folder / manifest.shards[0].features_files[site].name).read_bytes()
        assert data == npy_header((4, width), "float32") + b"".join(expected)


def test_the_rows_table_is_the_same_bytes_every_time(local):
    rows = make_rows(5, failed=[FAILED_ROW])
    first = write_dataset(local, rows, dataset_id="one")
    second = write_dataset(local, rows, dataset_id="two")
    assert [s.files for s in first.shards] == [s.files for s in second.shards]
    assert make_spec(rows).rows == 5


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", [0, 7, 99_999, 100_000, 1_234_567, 999_999_999])
def test_shard_numbers_have_five_digits_or_more(shard):
    name = receipt_key("d", shard).rpartition("/")[2]
    assert name == f"shard-{str(shard).rjust(5, '0')}.receipt.json"
    assert receipt_shard(name) == shard
    name = file_name(shard, "0123456789abcdef" * 4, ".embed.npy")
    assert name == f"shard-{str(shard).rjust(5, '0')}-0123456789abcdef.embed.npy"
    assert content_shard(name) == shard


@pytest.mark.parametrize("digits", ["", "1", "0001", "000001", "0100000", "0000\u0661", "-0001"])
def test_a_receipt_has_one_name_alone(digits):
    assert receipt_shard(f"shard-{digits}.receipt.json") is None


# --- the reader that the page ends with -----------------------------------------------------------


@pytest.fixture(scope="module")
def second_reader():
    (code,) = re.findall(r"^```python\n(.*?)^```$", FORMAT, re.DOTALL | re.MULTILINE)
    namespace = {}
    exec(compile(code, "FORMAT.md", "exec"), namespace)
    return namespace["read"]


@pytest.mark.parametrize("name", ["golden", "golden-per-site", "golden-arrow", "golden-trace"])
def test_the_second_reader_reads_what_the_first_one_reads(second_reader, name):
    found, ours = second_reader(GOLDEN_FOLDER, name), load_dataset(GOLDEN_FOLDER, name)
    good = [row for row in found["rows"] if row["status"] == "ok"]
    assert [row["id"] for row in good] == ours.row_ids
    assert [json.loads(row["metadata"]) for row in good] == ours.metadata
    assert [row["token_ids"] for row in good] == [ids.tolist() for ids in ours.token_ids]
    assert [row["length"] for row in good] == np.diff(ours.offsets).tolist()
    for site in ours.manifest.sites:
        assert found["features"][site].dtype == np.float32
        assert np.array_equal(found["features"][site], ours.site(site))


@pytest.mark.parametrize("name", ["golden", "golden-arrow"])
def test_the_second_reader_finds_damage_in_every_file_that_it_reads(second_reader, tmp_path, name):
    shutil.copytree(GOLDEN_FOLDER / "datasets" / name, tmp_path / "datasets" / name)
    assert second_reader(tmp_path, name)
    paths = [p for p in (tmp_path / "datasets" / name).iterdir() if "receipt" not in p.name]
    for path in paths:
        good = path.read_bytes()
        path.write_bytes(good[:-20] + bytes([good[-20] ^ 1]) + good[-19:])
        with pytest.raises(ValueError, match=r"\w"):
            second_reader(tmp_path, name)
        path.write_bytes(good)

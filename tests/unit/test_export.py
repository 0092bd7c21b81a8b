"""Exports: every value comes back as the dataset has it, and a folder is whole or not there."""

import json
import os
import sys
from itertools import pairwise

import numpy as np
import pyarrow.dataset as pa_dataset
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from tests.dataset.dataset_builders import (
    MODEL,
    capture,
    features_of,
    make_rows,
    make_spec,
    rows_of,
    write_dataset,
)
from wllm_ray.cli import app as wllm
from wllm_ray.dataset.format.dtypes import narrow, widen
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.dataset.writing.writer import commit_manifest, create_spec, stage_shard
from wllm_ray.errors import IntegrityError, InvalidInputError, NotFoundError, StorageError
from wllm_ray.export import FORMATS, export_dataset, saelens
from wllm_ray.export.saelens import hook_name

pytestmark = pytest.mark.requirement("L-4")

KINDS = {
    "one": {},
    "sites": {"sites": ("embed", "L0_resid_post", "L3_mlp_out")},
    "widths": {"sites": ("L0_resid_post", "L3_mlp_out"), "site_widths": (4, 6)},
    "ragged": {"position": "all_prompt", "sites": ("L0_resid_post", "L1_resid_post")},
    "chosen": {"position": "index:-1,0"},
    "mean": {"position": "mean_prompt"},
    "bfloat16": {"storage_dtype": "native", "dtype": "bfloat16"},
    "float16": {"storage_dtype": "float16", "dtype": "float16", "shard_format": "arrow"},
}
FAILED = (1, 6, 7, 8)  # shard 2 holds nothing else


@pytest.fixture(params=KINDS)
def dataset(request, tmp_path):
    return make(tmp_path, **KINDS[request.param])


def make(tmp_path, **options):
    """A dataset of four shards, whose values are exactly what they are stored as."""
    root, rows = str(tmp_path / "root"), make_rows(11, failed=FAILED)
    store, spec = open_store(root), make_spec(rows, **options)
    create_spec(store, spec)
    for shard in range(len(spec.shards)):
        part = rows_of(spec, rows, shard)
        good = [row for row in part if row.failure is None]
        values = {row.index: narrow(features_of(row, spec), spec.dtype) for row in good}
        features = {index: widen(value, spec.dtype) for index, value in values.items()}
        chunk = capture(part, spec, features=features, engine_dtype=spec.dtype)
        stage_shard(store, spec, shard, part, [chunk])
    commit_manifest(store, "d")
    return load_dataset(root, "d")


def exported(dataset, tmp_path, to):
    return export_dataset(str(tmp_path / "root"), "d", to, tmp_path / "out")


def blocks(dataset, site):
    """For each row its feature rows at a site."""
    offsets, values = dataset.offsets, dataset.site(site)
    return [values[a:b] for a, b in pairwise(offsets.tolist())]


def positions(dataset):
    """For each row the tokens that its feature rows are of."""
    by_position = {
        "all_prompt": lambda count: list(range(count)),
        "index:-1,0": lambda count: [count - 1, 0],
        "last_prompt": lambda count: [count - 1],
    }
    each = by_position[dataset.manifest.position]
    return [each(len(ids)) for ids in dataset.token_ids]


# --- what comes back ------------------------------------------------------------------------------


def test_parquet_comes_back_bit_by_bit(dataset, tmp_path):
    folder = exported(dataset, tmp_path, "parquet")
    files = sorted(path.name for path in folder.glob("*.parquet"))
    assert files == [f"shard-0000{shard}.parquet" for shard in range(4)]
    table = pq.read_table([folder / name for name in files])
    assert table.column("id").to_pylist() == dataset.row_ids
    assert [json.loads(text) for text in table.column("metadata").to_pylist()] == dataset.metadata
    ids = [one.tolist() for one in dataset.token_ids]
    assert table.column("token_ids").to_pylist() == ids
    for site in dataset.manifest.sites:
        rows = [np.array(row, np.float32) for row in table.column(site).to_pylist()]
        found = np.concatenate([row.reshape(-1, dataset.site(site).shape[1]) for row in rows])
        assert found.tobytes() == np.ascontiguousarray(dataset.site(site)).tobytes()
    several = dataset.manifest.position in ("all_prompt", "index:-1,0")
    assert ("position" in table.column_names) == several
    if several:
        assert table.column("position").to_pylist() == positions(dataset)


@pytest.mark.parametrize(("to", "place"), [("parquet", "."), ("hf", "data")], ids=["parquet", "hf"])
def test_pyarrow_reads_the_folder(dataset, tmp_path, to, place):
    folder = exported(dataset, tmp_path, to) / place
    assert pq.read_table(folder).column("id").to_pylist() == dataset.row_ids
    found = pa_dataset.dataset(folder)
    assert found.count_rows() == len(dataset)
    assert set(dataset.manifest.sites) < set(found.schema.names)


@pytest.mark.parametrize("to", FORMATS)
def test_all_files_may_be_read_by_the_same_people(tmp_path, to):
    if to in ("safetensors", "saelens"):
        pytest.importorskip({"saelens": "datasets"}.get(to, to))
    dataset = make(tmp_path)
    before = os.umask(0o027)
    try:
        folder = exported(dataset, tmp_path, to)
    finally:
        os.umask(before)
    modes = {path.stat().st_mode & 0o777 for path in folder.rglob("*") if path.is_file()}
    assert modes == {0o640}


def test_safetensors_keep_the_stored_dtype(dataset, tmp_path):
    safetensors = pytest.importorskip("safetensors")
    folder = exported(dataset, tmp_path, "safetensors")
    manifest = dataset.manifest
    names = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
    rows, values = [], dict.fromkeys(manifest.sites, b"")
    for shard in range(4):
        found = safetensors.deserialize((folder / f"shard-0000{shard}.safetensors").read_bytes())
        count = manifest.shards[shard].feature_rows
        for (site, tensor), width in zip(sorted(found), sorted_widths(manifest), strict=True):
            assert tensor["dtype"] == names[manifest.dtype]
            assert list(tensor["shape"]) == [count, width]
            values[site] += bytes(tensor["data"])
        sidecar = json.loads((folder / f"shard-0000{shard}.json").read_text())
        assert sidecar["offsets"][-1] == count
        rows += sidecar["rows"]
    for site in manifest.sites:
        stored = narrow(np.ascontiguousarray(dataset.site(site)), manifest.dtype)
        assert values[site] == stored.tobytes()
    assert [row["id"] for row in rows] == dataset.row_ids
    assert [row["metadata"] for row in rows] == dataset.metadata
    assert [row["token_ids"] for row in rows] == [ids.tolist() for ids in dataset.token_ids]
    mean = manifest.position == "mean_prompt"
    wanted = [None] * len(rows) if mean else positions(dataset)
    assert [row["positions"] for row in rows] == wanted


def sorted_widths(manifest):
    pairs = sorted(zip(manifest.sites, manifest.site_widths, strict=True))
    return [width for _, width in pairs]


def test_saelens_gets_single_vectors_with_their_tokens(dataset, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    # Two feature rows at a time, so that shards are written in several batches.
    monkeypatch.setattr(saelens, "_BATCH_BYTES", 2 * 4 * sum(dataset.manifest.site_widths))
    folder = exported(dataset, tmp_path, "saelens")
    assert not (folder / "parts").exists()
    found = datasets.load_from_disk(folder)
    manifest = dataset.manifest
    for site, width in zip(manifest.sites, manifest.site_widths, strict=True):
        column = hook_name(site)
        assert found.features[column].shape == (1, width)
        assert found.features[column].dtype == "float32"
        values = found.with_format("numpy")[column][:]
        assert values[:, 0].tobytes() == np.ascontiguousarray(dataset.site(site)).tobytes()
    lengths = np.diff(dataset.offsets)
    assert found["row_id"][:] == np.repeat(dataset.row_ids, lengths).tolist()
    if manifest.position == "mean_prompt":
        assert "token_ids" not in found.column_names
    else:
        pairs = zip(dataset.token_ids, positions(dataset), strict=True)
        wanted = [[int(ids[place])] for ids, places in pairs for place in places]
        assert found["token_ids"][:] == wanted


def test_an_object_store_can_be_exported(tmp_path):
    write_dataset(open_store("memory://export"), make_rows(11, failed=FAILED))
    export_dataset("memory://export", "d", "parquet", tmp_path / "out")
    table = pq.read_table(tmp_path / "out/shard-00000.parquet")
    assert table.column("id").to_pylist() == load_dataset("memory://export", "d").row_ids[:2]


def test_hugging_face_loads_the_folder(tmp_path):
    datasets = pytest.importorskip("datasets")
    dataset = make(tmp_path, **KINDS["ragged"])
    folder = exported(dataset, tmp_path, "hf")
    found = datasets.load_dataset(str(folder), split="train", cache_dir=str(tmp_path / "cache"))
    assert found["id"][:] == dataset.row_ids
    site = dataset.manifest.sites[1]
    for row, block in zip(found[site][:], blocks(dataset, site), strict=True):
        assert np.array_equal(np.array(row, np.float32), block)


def test_hooks_have_the_names_of_transformerlens():
    assert hook_name("L7_resid_post") == "blocks.7.hook_resid_post"
    assert hook_name("L0_mlp_out") == "blocks.0.hook_mlp_out"
    assert hook_name("L3_mamba_out") == "L3_mamba_out"
    assert hook_name("embed") == "embed"


# --- provenance -----------------------------------------------------------------------------------


@pytest.mark.parametrize("to", FORMATS)
def test_an_export_says_where_it_comes_from(tmp_path, to):
    if to == "saelens":
        pytest.importorskip("datasets")
    dataset = make(tmp_path)
    before = {path: path.read_bytes() for path in (tmp_path / "root").rglob("*") if path.is_file()}
    facts = json.loads((exported(dataset, tmp_path, to) / "_provenance.json").read_text())
    manifest = dataset.manifest
    assert facts["content_sha256"] == manifest.content_sha256
    assert facts["manifest_sha256"] == manifest.manifest_sha256
    assert facts["spec"] == json.loads(manifest.spec().model_dump_json())
    assert (facts["rows_exported"], facts["rows_failed"]) == (7, 4)
    after = {path: path.read_bytes() for path in (tmp_path / "root").rglob("*") if path.is_file()}
    assert after == before


def test_a_card_takes_hostile_names_for_text(tmp_path):
    name = "<script>alert(1)</script>|\n# [x](javascript:1) `"
    dataset = make(tmp_path, model=MODEL.model_copy(update={"name": name}))
    card = (exported(dataset, tmp_path, "hf") / "README.md").read_text()
    (line,) = [line for line in card.splitlines() if line.startswith("| model |")]
    assert not set(line[10:-2]) & set("<>|[]`\n()")
    assert "license: unknown" in card


# --- whole or not there ---------------------------------------------------------------------------


@pytest.mark.parametrize("make_output", [os.mkdir, lambda path: None], ids=["empty", "new"])
def test_an_empty_or_new_folder_is_taken(tmp_path, make_output):
    dataset = make(tmp_path)
    make_output(tmp_path / "out")
    exported(dataset, tmp_path, "parquet")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "root"]


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    make(tmp_path)
    (tmp_path / "out").mkdir()
    (tmp_path / "out/mine").write_text("mine")
    with pytest.raises(InvalidInputError, match=r"expected a new or empty folder, found .*/out"):
        export_dataset(str(tmp_path / "root"), "d", "parquet", tmp_path / "out")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidInputError, match="expected a new or empty folder"):
        export_dataset(str(tmp_path / "root"), "d", "parquet", tmp_path / "file")
    assert (tmp_path / "out/mine").read_text() == (tmp_path / "file").read_text() == "mine"


@pytest.mark.requirement("D-5")
@pytest.mark.parametrize("to", ["parquet", "hf"])
def test_a_damaged_source_leaves_nothing_behind(tmp_path, to):
    dataset = make(tmp_path)
    path = tmp_path / "root/datasets/d" / dataset.manifest.shards[3].features_files[0].name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError) as caught:
        exported(dataset, tmp_path, to)
    assert caught.value.code == "digest_mismatch"
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_a_folder_filled_meanwhile_is_kept(tmp_path, monkeypatch):
    make(tmp_path)

    def slow(files, folder):
        (tmp_path / "out").mkdir()
        (tmp_path / "out/theirs").write_text("theirs")

    monkeypatch.setitem(FORMATS, "parquet", slow)
    with pytest.raises(StorageError, match=r"cannot write the export .*/out: Directory not empty"):
        export_dataset(str(tmp_path / "root"), "d", "parquet", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "root"]
    assert (tmp_path / "out/theirs").read_text() == "theirs"


@pytest.mark.parametrize("address", ["s3://bucket/KEY", "file:///tmp/KEY", "s3:/bucket/KEY"])
def test_an_address_is_no_folder_to_export_to(tmp_path, monkeypatch, address):
    make(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidInputError, match="a local folder is needed") as caught:
        export_dataset("root", "d", "parquet", address)
    assert "KEY" not in caught.value.message
    arguments = ["export", "root", "d", "--to", "parquet", "--output", address]
    result = CliRunner().invoke(wllm, arguments)
    assert result.exit_code == 2
    assert "a local folder is needed" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_an_unknown_format_or_dataset_is_refused(tmp_path):
    make(tmp_path)
    with pytest.raises(InvalidInputError, match="expected one of parquet, safetensors"):
        export_dataset(str(tmp_path / "root"), "d", "csv", tmp_path / "out")
    with pytest.raises(NotFoundError):
        export_dataset(str(tmp_path / "root"), "other", "parquet", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["saelens", "hf"])
def test_what_cannot_be_loaded_empty_is_not_written(tmp_path, to):
    pytest.importorskip("datasets")
    write_dataset(open_store(str(tmp_path / "root")), make_rows(2, failed=(0, 1)))
    with pytest.raises(InvalidInputError, match="no row of dataset 'd' has an activation"):
        export_dataset(str(tmp_path / "root"), "d", to, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["root"]


def test_the_command_exports(tmp_path):
    make(tmp_path)
    output = tmp_path / "out"
    arguments = ["export", f"{tmp_path}/root/datasets/d", "--to", "parquet", "--output"]
    result = CliRunner().invoke(wllm, [*arguments, str(output)])
    assert (result.exit_code, result.stdout) == (0, f"{output}\n")
    assert (output / "shard-00000.parquet").is_file()
    assert CliRunner().invoke(wllm, [*arguments, str(output)]).exit_code == 2


@pytest.mark.parametrize("to", ["parquet", "hf"])
def test_some_formats_need_no_extra(tmp_path, monkeypatch, to):
    dataset = make(tmp_path)
    for package in ("datasets", "safetensors"):
        monkeypatch.setitem(sys.modules, package, None)
    assert list(exported(dataset, tmp_path, to).rglob("*.parquet"))


def test_a_missing_package_names_the_extra(tmp_path, monkeypatch):
    make(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    arguments = ["export", str(tmp_path / "root"), "d", "--to", "safetensors", "--output"]
    result = CliRunner().invoke(wllm, [*arguments, str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "pip install '.[export]' in a checkout" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["root"]

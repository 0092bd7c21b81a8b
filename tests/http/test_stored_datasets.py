"""Formats, dtypes and traces of datasets, asked for over HTTP and found on the storage root."""

import numpy as np
import pyarrow as pa
import pytest

from tests import fakes
from tests.fakes import SITES, Application, fake_activation, fake_description, rivalled
from tests.http.calls import ROWS, body, caller, error_of, post
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.offered import offered_sites, site_widths
from wllm_ray.wire import ARROW_STREAM, decode_arrow

KEPT = {"persistence": "dataset", "dataset_id": "d"}


@pytest.mark.requirement("H-1", "D-1", "C-10")
@pytest.mark.parametrize("shard_format", ["npy", "arrow"])
@pytest.mark.parametrize(
    ("storage_dtype", "dtype"),
    [("float32", "float32"), ("native", "float32"), ("float16", "float16")],
)
async def test_a_dataset_is_stored_as_it_is_asked_for(tmp_path, shard_format, storage_dtype, dtype):
    app = Application(open_store(tmp_path))
    request = body(layers=[0, 3], position="all_prompt")
    inline = decode_arrow((await post(app, request, accept=ARROW_STREAM)).content)
    asked = {"shard_format": shard_format, "storage_dtype": storage_dtype}
    answer = (await post(app, request | KEPT | asked)).json()
    assert answer["dtype"] == dtype
    dataset = load_dataset(tmp_path, "d", verify="full")
    assert (dataset.manifest.storage_dtype, dataset.manifest.dtype) == (storage_dtype, dtype)
    expected = inline.stacked().astype(dtype)
    assert np.array_equal(dataset.features_3d, expected)
    path = tmp_path / "datasets/d" / dataset.manifest.shards[0].features_files[0].name
    assert path.suffix == f".{shard_format}"
    if shard_format == "arrow":
        by_arrow = pa.ipc.open_file(pa.memory_map(str(path))).read_all().column("features")
        assert np.array_equal(by_arrow.to_pylist(), expected)
    else:
        assert np.array_equal(np.load(path, mmap_mode="r", allow_pickle=False), expected)


@pytest.mark.requirement("H-1", "D-4")
async def test_the_answer_counts_shards_that_were_written_first_with_other_numbers(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("tests.fakes.stage_shard", rivalled(fakes.stage_shard, {0}))
    asked = body(rows=ROWS) | KEPT | {"rows_per_shard": 1}
    app = Application(open_store(tmp_path))
    for superseded in (1, 0):
        answer = (await post(app, asked)).json()["dataset"]
        assert (answer["shards"], answer["shards_superseded"]) == (len(ROWS), superseded)


@pytest.mark.requirement("H-1", "D-9")
@pytest.mark.parametrize("position", ["last_prompt", "mean_prompt"])
async def test_traces_hold_every_site_at_every_token(tmp_path, position):
    """The dataset beside them is the one without traces, to the content digest."""
    app = Application(open_store(tmp_path))
    rows = [*ROWS, {"id": "bad", "prompt": ""}]
    request = body(rows=rows, layers=None, sites=["L1_mlp_out"], position=position)
    plain = (await post(app, request | KEPT)).json()
    kept = {"persistence": "full_trace", "dataset_id": "t"}
    answer = (await post(app, request | kept)).json()
    assert answer["rows"] == plain["rows"]
    assert answer["dataset"]["content_sha256"] == plain["dataset"]["content_sha256"]
    dataset = load_dataset(tmp_path, "t", verify="full")
    served = fake_description()
    sites = offered_sites(served)
    assert len(sites) == sum(len(one.layers or (0,)) for one in SITES)
    for row in ROWS:
        trace = dataset.trace(row["id"])
        ids = np.array(list(row["prompt"].encode()), np.int32)
        assert np.array_equal(trace.token_ids, ids)
        for site, width in zip(sites, site_widths(served, sites), strict=True):
            expected = [fake_activation(ids[: n + 1], site, width) for n in range(len(ids))]
            assert np.array_equal(trace.sites[str(site)], expected)
    assert (await post(app, request | kept)).json()["dataset"] == answer["dataset"]


@pytest.mark.requirement("C-17")
async def test_what_is_said_of_a_dataset_is_refused_where_none_is_made():
    asked = body(storage_dtype="native", rows_per_shard=3, dataset_id="d")
    error = error_of(await post(Application(), asked), 422)
    assert error["details"]["fields"] == ["rows_per_shard", "storage_dtype", "dataset_id"]
    assert "ask for persistence `dataset`" in error["message"]


@pytest.mark.requirement("H-5")
async def test_the_schema_says_what_can_be_stored(tmp_path):
    async with caller(Application(open_store(tmp_path))) as client:
        schema = (await client.get("/v1/extraction-schema")).json()
    assert schema["persistence"] == ["none", "dataset", "full_trace"]
    assert schema["storage_dtypes"] == ["float32", "native", "float16"]
    assert schema["shard_formats"] == ["npy", "arrow"]

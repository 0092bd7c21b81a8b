"""Every way in, on a real application: HTTP, the client, the command line, a handle."""

import io
import json
import subprocess
import sys
import textwrap

import httpx
import numpy as np
import pytest

from tests.cluster.conftest import BIN, ROOT, cluster_env
from wllm_ray import StorageOptions, load_dataset
from wllm_ray.client import WLLMClient
from wllm_ray.wire import ARROW_STREAM, decode_arrow

ROWS = [
    {"id": f"row-{n}", "prompt": "the cat sat on the mat " * (n + 1), "metadata": {"n": n}}
    for n in range(6)
]


def body(application, **fields):
    return {"model": application.served, "rows": ROWS, "layers": [0, 2], **fields}


def post(application, payload, accept="application/json"):
    return httpx.post(
        f"{application.base_url}/v1/activation-datasets",
        json=payload,
        headers={"accept": accept},
        timeout=120,
    )


@pytest.mark.requirement("H-5", "R-1")
def test_probes_models_and_schema_answer(application):
    get = lambda path: httpx.get(application.base_url + path, timeout=10)  # noqa: E731
    assert get("/livez").json() == {"status": "alive"}
    assert get("/readyz").status_code == 200
    (card,) = get("/v1/models").json()["data"]
    assert card["id"] == application.served
    assert card["model"]["revision"].startswith("sha256:")
    schema = get("/v1/extraction-schema").json()
    assert {"name": "L0_resid_post", "kind": "resid_post", "layer": 0, "width": 128} in schema[
        "sites"
    ]
    assert schema["depth_bounded"] is True
    assert schema["selftest"]["passed"] is True
    assert schema["persistence"] == ["none", "dataset", "full_trace"]


@pytest.mark.requirement("H-1", "H-2")
def test_the_three_inline_forms_hold_the_same_numbers(application):
    as_json = post(application, body(application)).json()
    as_arrow = decode_arrow(post(application, body(application), ARROW_STREAM).content)
    as_npy = np.load(io.BytesIO(post(application, body(application), "application/x-npy").content))
    features = np.array(as_json["features"], dtype=np.float32)
    assert features.shape == (6, 2, as_json["shape"][2])
    np.testing.assert_array_equal(features, as_arrow.stacked())
    np.testing.assert_array_equal(features, as_npy)
    assert [row["id"] for row in as_json["rows"]] == [row["id"] for row in ROWS]
    assert as_json["sites"] == ["L0_resid_post", "L2_resid_post"]


@pytest.mark.requirement("S-4", "H-1")
def test_a_dataset_by_http_holds_what_inline_answers_hold(application):
    answer = post(application, body(application, persistence="dataset", dataset_id="by-http"))
    assert answer.status_code == 200, answer.text
    dataset = load_dataset(application.root, "by-http", verify="full")
    assert dataset.manifest.manifest_sha256 == answer.json()["dataset"]["manifest_sha256"]
    inline = np.array(post(application, body(application)).json()["features"], dtype=np.float32)
    np.testing.assert_array_equal(dataset.features, inline)
    assert dataset.metadata[3] == {"n": 3}
    assert dataset.row_ids[5] == "row-5"


@pytest.mark.requirement("C-8", "C-9", "D-1", "S-4")
def test_all_tokens_and_unlike_sites_are_the_same_inline_by_the_client_and_on_the_server(
    application,
):
    asked = {
        "sites": ["L1_mlp_out", "embed", "L0_attn_out_prelinear", "final_norm"],
        "position": "all_prompt",
    }
    payload = body(application, layers=None, **asked)
    inline = decode_arrow(post(application, payload, ARROW_STREAM).content)
    lengths = [len(row.token_ids) for row in inline.response.rows]
    assert [row.length for row in inline.response.rows] == lengths
    kept = {"persistence": "dataset", "dataset_id": "ragged", "shard_layout": "per_site"}
    answer = post(application, payload | kept)
    assert answer.status_code == 200, answer.text
    stored = load_dataset(application.root, "ragged", verify="full")
    with WLLMClient(application.base_url) as client:
        local = client.extract_activations(
            application.served,
            [row["prompt"] for row in ROWS],
            row_ids=[row["id"] for row in ROWS],
            metadata=[row["metadata"] for row in ROWS],
            storage=StorageOptions(shard_layout="per_site"),
            **asked,
        )
    assert local.manifest.content_sha256 == stored.manifest.content_sha256
    for number, site in enumerate(asked["sites"]):
        np.testing.assert_array_equal(stored.site(site), inline.site(number))
        np.testing.assert_array_equal(local.site(site), inline.site(number))
    assert stored.offsets.tolist() == [0, *np.cumsum(lengths)]
    # The last token of each row is what the default position gives.
    last = post(application, body(application, layers=None, sites=["L1_mlp_out"])).json()
    np.testing.assert_array_equal(
        stored.site("L1_mlp_out")[stored.offsets[1:] - 1],
        np.array(last["features"], dtype=np.float32)[:, 0],
    )


@pytest.mark.requirement("D-9", "D-1", "C-10")
def test_traces_are_kept_beside_features_in_the_engines_own_dtype(application):
    """What a plain dataset of the same rows holds, and every site at every token."""
    asked = body(application, layers=None, sites=["L1_mlp_out"], position="mean_prompt")
    kept = {"shard_format": "arrow", "storage_dtype": "native", "rows_per_shard": 2}
    plain = asked | kept | {"persistence": "dataset", "dataset_id": "untraced"}
    traced = asked | kept | {"persistence": "full_trace", "dataset_id": "traced"}
    first, second = (post(application, one).json()["dataset"] for one in (plain, traced))
    assert first["content_sha256"] == second["content_sha256"]
    dataset = load_dataset(application.root, "traced", verify="full")
    every = body(application, layers=None, sites=["L0_attn_out", "embed"], position="all_prompt")
    inline = decode_arrow(post(application, every, ARROW_STREAM).content)
    for row in inline.response.rows:
        trace = dataset.trace(row.id)
        tokens = slice(row.offset, row.offset + row.length)
        assert trace.token_ids.tolist() == row.token_ids
        np.testing.assert_array_equal(trace.sites["L0_attn_out"], inline.site(0)[tokens])
        np.testing.assert_array_equal(trace.sites["embed"], inline.site(1)[tokens])


@pytest.mark.requirement("H-1", "H-7")
def test_the_same_id_with_other_rows_is_a_conflict_and_the_same_rows_are_not(application):
    payload = body(application, persistence="dataset", dataset_id="twice")
    first = post(application, payload).json()["dataset"]
    assert post(application, payload).json()["dataset"] == first
    changed = [*ROWS[:5], ROWS[5] | {"prompt": "another prompt"}]
    refused = post(application, payload | {"rows": changed})
    assert refused.status_code == 409
    assert refused.json()["error"]["code"] == "dataset_immutable"


@pytest.mark.requirement("C-16", "H-1")
def test_rows_that_cannot_run_fail_alone_and_shift_nobody(application):
    rows = [
        ROWS[0],
        {"id": "empty", "prompt": ""},
        {"id": "long", "token_ids": [5] * 257},
        ROWS[1],
        {"id": "foreign", "token_ids": [5, 10**9]},
        {"id": "chat", "messages": [{"role": "user", "content": "hello"}]},
        ROWS[2],
    ]
    answer = post(application, body(application, rows=rows)).json()
    codes = [row["failure"] and row["failure"]["code"] for row in answer["rows"]]
    assert codes == [
        None, "empty_prompt", "too_long", None, "token_out_of_vocabulary", "no_chat_template", None,
    ]  # fmt: skip
    assert "257 tokens" in answer["rows"][2]["failure"]["message"]
    alone = post(application, body(application, rows=ROWS[:3])).json()["features"]
    assert answer["features"] == alone
    assert [row["offset"] for row in answer["rows"]] == [0, None, None, 1, None, None, 2]


@pytest.mark.requirement("P-1")
def test_the_client_builds_the_dataset_that_the_server_would(application):
    fields = {"row_ids": [r["id"] for r in ROWS], "metadata": [r["metadata"] for r in ROWS]}
    prompts = [r["prompt"] for r in ROWS]
    with WLLMClient(application.base_url, artifact_root=application.root) as client:
        client.wait_until_ready(30)
        local = client.extract_activations(application.served, prompts, layers=[0, 2], **fields)
        stored = client.extract_activations(
            application.served, prompts, layers=[0, 2], persist=True, **fields
        )
    np.testing.assert_array_equal(local.features, stored.features)
    assert local.manifest.content_sha256 == stored.manifest.content_sha256


@pytest.mark.requirement("P-2")
def test_a_handle_call_returns_a_reference(application):
    request = body(application, persistence="dataset", dataset_id="by-handle")
    script = f"""
        import json, sys
        import ray
        from ray import serve

        ray.init(address={application.ray_address!r}, log_to_driver=False)
        handle = serve.get_app_handle("wllm")
        reference = handle.extract.remote(json.loads(sys.stdin.read())).result(timeout_s=120)
        print(reference.model_dump_json())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        input=json.dumps(request),
        env=cluster_env(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    reference = json.loads(done.stdout.splitlines()[-1])
    by_http = post(application, request | {"dataset_id": "by-handle-http"}).json()["dataset"]
    assert reference["content_sha256"] == by_http["content_sha256"]
    assert load_dataset(application.root, "by-handle").row_ids == [row["id"] for row in ROWS]


@pytest.mark.requirement("L-3")
def test_the_command_line_writes_on_its_own_machine_and_resumes(application, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = [
        str(BIN / "wllm"), "activations", str(rows), "--base-url", application.base_url,
        "--model", application.served, "--layer", "0", "--layer", "2",
        "--dataset-id", "by-cli", "--output", str(tmp_path / "out"),
    ]  # fmt: skip
    first = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert first.returncode == 0, first.stderr
    dataset = load_dataset(tmp_path / "out", "by-cli", verify="full")
    stored = post(application, body(application, persistence="dataset", dataset_id="by-cli"))
    reference = stored.json()["dataset"]
    assert dataset.manifest.content_sha256 == reference["content_sha256"]
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert again.returncode == 0, again.stderr
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}


@pytest.mark.requirement("H-7")
@pytest.mark.parametrize(
    ("change", "status", "code"),
    [
        ({"model": "other"}, 404, "model_not_found"),
        ({"layers": [99]}, 422, "layer_out_of_range"),
        ({"layers": [0, 0]}, 422, "invalid_site"),
        ({"layers": None, "sites": ["L0_attn_pattern"]}, 422, "invalid_site"),
        ({"position": "middle"}, 422, "invalid_position"),
        ({"position": "all_generated"}, 422, "position_not_offered"),
        ({"layers": [0], "site": "mamba_out"}, 422, "site_not_offered"),
        ({"capture_mode": "online"}, 422, "capture_mode_not_offered"),
        ({"layer": [0]}, 422, "invalid_request"),
        ({"rows": []}, 422, "no_rows"),
        ({"rows": [{"id": "x"}]}, 422, "invalid_rows"),
    ],
)
def test_what_cannot_be_understood_is_refused_with_its_code(application, change, status, code):
    answer = post(application, body(application) | change)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)

"""The HTTP surface, driven as an ASGI app: shapes of answers and errors, bounds, negotiation."""

import asyncio
import io
import json
import logging

import httpx
import numpy as np
import pytest

from tests.fakes import HIDDEN_SIZE, MODEL, Application, FakeEngine, fake_description, serving
from tests.http.calls import PATH, ROWS, body, caller, error_of, post
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.errors import ERROR_CODES, UnavailableError
from wllm_ray.extraction import ExtractionLimits
from wllm_ray.records import RowFailure
from wllm_ray.schema import ActivationResponse, ExtractionSchema, ModelList
from wllm_ray.wire import ARROW_STREAM, JSON, NPY, decode_arrow

ROW_BYTES = HIDDEN_SIZE * 4


async def until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 (the code under test offers no event)
            await asyncio.sleep(0.005)


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.requirement("H-1")
async def test_an_answer_holds_every_row_in_request_order():
    rows = [*ROWS[:1], {"id": "bad", "prompt": ""}, *ROWS[1:]]
    response = await post(Application(), body(rows=rows))
    answer = ActivationResponse.model_validate_json(response.content)
    assert [row.id for row in answer.rows] == ["a", "bad", "b"]
    assert [row.offset for row in answer.rows] == [0, None, 1]
    assert [row.length for row in answer.rows] == [1, 0, 1]
    assert answer.rows[1].failure.code == "empty_prompt"
    assert answer.axes == ("row", "site", "hidden")
    assert answer.shape == (2, 1, HIDDEN_SIZE)
    assert answer.sites == ("L1_resid_post",)
    assert answer.rows[0].token_ids == list(b"one")
    assert set(answer.timings) >= {"tokenize_s", "capture_s"}


@pytest.mark.requirement("H-2")
async def test_json_arrow_and_npy_agree_to_the_bit():
    app = Application()
    request = body(layers=[0, 3], sites=["L2_resid_pre"])
    arrow = decode_arrow((await post(app, request, accept=ARROW_STREAM)).content)
    npy = np.load(io.BytesIO((await post(app, request, accept=NPY)).content), allow_pickle=False)
    plain = (await post(app, request)).json()
    assert npy.tobytes() == arrow.features.tobytes()
    assert np.array(plain["features"], np.float32).tobytes() == npy.tobytes()
    assert plain["rows"] == [row.model_dump(mode="json") for row in arrow.response.rows]


@pytest.mark.requirement("H-2")
@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("*/*", JSON),
        ("application/*", JSON),
        (NPY, NPY),
        (f"{JSON};q=0.1, {ARROW_STREAM}", ARROW_STREAM),
        (f"{JSON};q=0, */*", ARROW_STREAM),
        (f"text/html, {NPY.upper()};q=0.5", NPY),
    ],
)
async def test_the_answer_has_the_form_that_the_caller_prefers(accept, expected):
    response = await post(Application(), body(), accept=accept)
    assert response.headers["content-type"] == expected


@pytest.mark.requirement("H-2")
async def test_npy_refuses_rows_that_failed():
    rows = [*ROWS, {"id": "c", "prompt": ""}]
    error = error_of(await post(Application(), body(rows=rows), accept=NPY), 422)
    assert error["code"] == "failures_not_representable"
    assert error["details"]["failures"][0]["id"] == "c"


@pytest.mark.requirement("H-1")
async def test_a_row_that_may_pass_is_a_row_failure_in_an_inline_answer():
    fault = RowFailure.of("hook_failed", "x")
    engine = FakeEngine(fault=lambda row: fault if row.index == 0 else None)
    answer = (await post(Application(engine=engine), body())).json()
    assert [row["failure"] and row["failure"]["code"] for row in answer["rows"]] == [
        "hook_failed",
        None,
    ]
    assert answer["rows"][0]["token_ids"] == list(b"one")


@pytest.mark.requirement("H-5")
async def test_what_is_served_is_described():
    async with caller(Application()) as client:
        models = ModelList.model_validate_json((await client.get("/v1/models")).content)
        schema = ExtractionSchema.model_validate_json(
            (await client.get("/v1/extraction-schema")).content
        )
    assert models.data[0].id == MODEL
    assert schema.error_codes == ERROR_CODES
    assert schema.persistence == ("none",)


async def test_the_openapi_document_describes_the_body():
    async with caller(Application()) as client:
        document = (await client.get("/openapi.json")).json()
    content = document["paths"][PATH]["post"]["requestBody"]["content"]
    assert "rows" in content[JSON]["schema"]["properties"]


# --- datasets -------------------------------------------------------------------------------------


@pytest.mark.requirement("H-1", "D-4")
async def test_a_dataset_is_committed_once_and_found_again(tmp_path):
    app = Application(open_store(tmp_path))
    request = body(persistence="dataset", rows=[*ROWS, {"id": "bad", "prompt": ""}])
    first = (await post(app, request)).json()
    ran = app.engine.captured.total()
    second = (await post(app, request)).json()
    assert first["features"] is None
    assert first["dataset"]["rows_failed"] == 1
    assert first["dataset"] == second["dataset"]
    assert first["rows"] == second["rows"]
    assert app.engine.captured.total() == ran == 2


@pytest.mark.requirement("S-3")
async def test_the_same_request_twice_at_once_is_captured_once(tmp_path):
    app = Application(open_store(tmp_path), engine=FakeEngine(delay_s=0.05))
    request = body(persistence="dataset")
    answers = await asyncio.gather(*(post(app, request) for _ in range(3)))
    assert len({answer.json()["dataset"]["manifest_sha256"] for answer in answers}) == 1
    assert app.engine.captured.total() == 2


@pytest.mark.requirement("H-7")
@pytest.mark.parametrize("at_once", [True, False])
async def test_the_same_id_with_another_request_is_a_conflict(tmp_path, at_once):
    app = Application(open_store(tmp_path), engine=FakeEngine(delay_s=0.05))
    one, other = (body(persistence="dataset", dataset_id="d", layers=[n]) for n in (0, 1))
    if at_once:
        answers = await asyncio.gather(post(app, one), post(app, other))
        first, second = sorted(answers, key=lambda answer: answer.status_code)
        assert first.status_code == 200, "either may win"
    else:
        await post(app, one)
        second = await post(app, other)
    error = error_of(second, 409)
    assert error["code"] == ("dataset_conflict" if at_once else "dataset_immutable")


@pytest.mark.requirement("H-7", "L-6")
async def test_fewer_rows_under_a_committed_id_are_a_conflict_that_names_the_others(tmp_path):
    app = Application(open_store(tmp_path))
    request = body(persistence="dataset", dataset_id="d", rows_per_shard=1)
    await post(app, request)
    fewer = request | {"rows": request["rows"][:1]}
    error = error_of(await post(app, fewer), 409)
    assert error["details"]["rows"] == [row["id"] for row in request["rows"][1:]]


@pytest.mark.requirement("S-3")
async def test_a_caller_that_leaves_does_not_take_the_commit_along(tmp_path):
    app = Application(open_store(tmp_path), engine=FakeEngine(delay_s=0.1))
    task = asyncio.create_task(post(app, body(persistence="dataset", dataset_id="d")))
    await until(lambda: app.service._jobs)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not (tmp_path / "datasets/d/manifest.json").exists()
    await until(lambda: not app.service._jobs)
    assert (tmp_path / "datasets/d/manifest.json").exists()


@pytest.mark.requirement("R-7")
async def test_a_caller_that_leaves_stops_an_inline_extraction():
    app = Application(engine=FakeEngine(delay_s=30), max_concurrent_requests=1)
    with serving(app) as address:
        async with httpx.AsyncClient(base_url=address) as client:
            task = asyncio.create_task(client.post(PATH, json=body()))
            await until(lambda: app.engine.running or task.done())
            assert not task.done(), await task
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await until(lambda: app.engine.cancelled)
        app.engine.delay_s = 0
        async with httpx.AsyncClient(base_url=address) as client:
            assert (await client.post(PATH, json=body())).status_code == 200, "its place is free"


@pytest.mark.requirement("D-10")
async def test_rows_that_may_pass_leave_no_manifest_and_a_retry_finishes(tmp_path):
    faults = [RowFailure.of("position_missing", "lost")] * 3
    engine = FakeEngine(fault=lambda row: faults.pop() if row.index == 0 and faults else None)
    app = Application(open_store(tmp_path), engine=engine)
    request = body(persistence="dataset", dataset_id="d")
    failed = await post(app, request)
    error = error_of(failed, 503)
    assert error["code"] == "rows_failed"
    assert failed.headers["retry-after"] == "5"
    assert error["details"]["failures"][0]["id"] == "a"
    assert not (tmp_path / "datasets/d/manifest.json").exists()
    assert (await post(app, request)).status_code == 200


async def test_a_dataset_without_a_storage_root_is_refused():
    error = error_of(await post(Application(), body(persistence="dataset")), 500)
    assert error["code"] == "storage_not_configured"


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.requirement("H-7", "C-17")
@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"rows": []}, 422, "no_rows"),
        ({"rows": [{"id": "a"}]}, 422, "invalid_rows"),
        ({"rows": [ROWS[0], ROWS[0]]}, 422, "invalid_rows"),
        ({"rows": "x"}, 422, "invalid_request"),
        ({"colour": 1}, 422, "invalid_request"),
        ({"layers": [-1]}, 422, "invalid_request"),
        ({"batch_size": 0}, 422, "invalid_request"),
        ({"dataset_id": "../up"}, 422, "invalid_request"),
        ({"layers": [4]}, 422, "layer_out_of_range"),
        ({"layers": None}, 422, "invalid_site"),
        ({"layers": [1, 1]}, 422, "invalid_site"),
        ({"sites": ["L1_block"]}, 422, "invalid_site"),
        ({"site": "nowhere"}, 422, "invalid_site"),
        ({"site": "mamba_out"}, 422, "site_not_offered"),
        ({"position": "all_generated"}, 422, "position_not_offered"),
        ({"position": "everywhere"}, 422, "invalid_position"),
        ({"position": {"index": [0, 0]}}, 422, "invalid_position"),
        ({"position": 0}, 422, "invalid_request"),
        ({"shard_layout": "flat"}, 422, "invalid_request"),
        ({"capture_mode": "online"}, 422, "capture_mode_not_offered"),
        ({"persistence": "everything"}, 422, "invalid_request"),
        ({"storage_dtype": "int8"}, 422, "invalid_request"),
        ({"shard_format": "csv"}, 422, "invalid_request"),
        # Said of a dataset where none is asked for.
        ({"storage_dtype": "float16"}, 422, "invalid_request"),
        ({"dataset_id": "d"}, 422, "invalid_request"),
        ({"model": "other"}, 404, "model_not_found"),
    ],
)
async def test_what_cannot_be_asked_is_refused_before_anything_runs(changes, status, code):
    app = Application()
    assert error_of(await post(app, body(**changes)), status)["code"] == code
    assert app.engine.tasks == 0


@pytest.mark.requirement("L-6", "H-7")
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"\xff",
        b'{"model":"a","model":"b"}',
        b'{"model":"fake-model","rows":[{"id":"a","prompt":"x","metadata":{"k":NaN}}]}',
    ],
)
async def test_a_body_that_is_not_strict_json_is_refused(raw):
    assert error_of(await post(Application(), raw), 422)["code"] == "invalid_json"


@pytest.mark.requirement("L-6")
async def test_all_malformed_rows_are_listed_by_position():
    rows = [{"id": "z", "prompt": 1}, ROWS[0], {"prompt": "x"}]
    error = error_of(await post(Application(), body(rows=rows)), 422)
    assert [one["line"] for one in error["details"]["problems"]] == [1, 3]


async def test_a_wrong_field_is_named_and_its_value_is_not_quoted():
    error = error_of(await post(Application(), body(batch_size="SECRET")), 422)
    assert "batch_size" in error["message"]
    assert "SECRET" not in json.dumps(error)


@pytest.mark.requirement("H-7")
async def test_a_form_that_is_not_offered_is_406():
    assert error_of(await post(Application(), body(), accept="text/csv"), 406)["code"] == (
        "media_type_not_offered"
    )


@pytest.mark.requirement("H-2")
async def test_a_result_over_the_bound_says_how_much_fits():
    app = Application(limits=ExtractionLimits(max_inline_bytes=ROW_BYTES))
    error = error_of(await post(app, body()), 413)
    assert error["code"] == "result_too_large"
    assert (
        "2 feature rows of 32, and the bound is 32, 1 feature rows; send fewer"
        in (error["message"])
    )
    assert error["details"] == {"bytes": 2 * ROW_BYTES, "max_inline_bytes": ROW_BYTES}
    assert app.engine.tasks == 0


@pytest.mark.requirement("H-7")
@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_over_the_bound_is_refused(declared):
    async def pieces():
        for _ in range(20):
            yield b" " * 100

    app = Application(max_body_bytes=1000)
    async with caller(app) as client:
        content = b" " * 2000 if declared else pieces()
        error = error_of(await client.post(PATH, content=content), 413)
    assert error["code"] == "body_too_large"
    assert error["details"] == {"max_body_bytes": 1000}


@pytest.mark.requirement("H-7")
async def test_more_at_once_than_the_bound_is_429_with_retry_after():
    app = Application(engine=FakeEngine(delay_s=0.1), max_concurrent_requests=1)
    answers = await asyncio.gather(post(app, body()), post(app, body()))
    refused = next(answer for answer in answers if answer.status_code != 200)
    assert error_of(refused, 429)["code"] == "overloaded"
    assert int(refused.headers["retry-after"]) > 0
    assert (await post(app, body())).status_code == 200, "the place is free again"


@pytest.mark.requirement("H-5", "H-7")
async def test_before_a_replica_is_ready_everything_but_livez_is_503():
    app = Application()
    app.service.description = None
    async with caller(app) as client:
        assert (await client.get("/livez")).status_code == 200
        for path in ("/readyz", "/v1/models", "/v1/extraction-schema"):
            response = await client.get(path)
            assert error_of(response, 503)["code"] == "not_ready"
            assert response.headers["retry-after"]
    assert error_of(await post(app, body()), 503)["code"] == "not_ready"
    app.service.description = fake_description()
    async with caller(app) as client:
        assert (await client.get("/readyz")).json() == {"status": "ready"}


@pytest.mark.requirement("H-7")
@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic key"}, 401),
        ({"Authorization": "Bearer kéy"}, 401),
        ({"X-API-Key": "wrong"}, 401),
        ({"Authorization": "Bearer key"}, 200),
        ({"Authorization": "bearer key"}, 200),
        ({"X-API-Key": "key"}, 200),
    ],
)
async def test_where_a_key_is_set_it_is_needed(headers, status):
    app = Application(api_key="key")
    encoded = {name: value.encode() for name, value in headers.items()}
    async with caller(app) as client:
        response = await client.get("/v1/models", headers=encoded)
        assert response.status_code == status
        if status == 401:
            error = error_of(response, 401)
            sent = headers and headers.get("Authorization") != "Basic key"
            said = "that was sent is not the one" if sent else "needs an API key, and none was sent"
            assert (error["code"], said in error["message"]) == ("unauthorized", True)
        for path in ("/livez", "/readyz"):
            assert (await client.get(path)).status_code == 200


@pytest.mark.requirement("H-7")
@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/", 404),
        ("GET", "/datasets/d/manifest.json", 404),
        ("GET", "/v1/../etc/passwd", 404),
        ("GET", PATH, 405),
        ("DELETE", "/v1/models", 405),
    ],
)
async def test_other_routes_are_errors_in_the_one_shape(method, path, status):
    async with caller(Application()) as client:
        error = error_of(await client.request(method, path), status)
    assert error["code"] == "route_not_found"


# --- faults ---------------------------------------------------------------------------------------


@pytest.mark.requirement("H-7")
async def test_a_foreign_exception_leaves_as_an_opaque_500_and_its_text_reaches_no_log(caplog):
    app = Application()
    text = "SEC" + "RET"  # the log shows source lines, of which this is none

    async def explode(_task, *, alone):
        raise KeyError(text)

    app.service._backend.capture = explode
    with caplog.at_level(logging.DEBUG):
        error = error_of(await post(app, body()), 500)
    assert error["code"] == "internal_error"
    assert "SECRET" not in json.dumps(error)
    assert "KeyError" in caplog.text
    assert "explode" in caplog.text
    assert "SECRET" not in caplog.text


@pytest.mark.requirement("H-7")
async def test_prompts_and_keys_reach_no_log(caplog):
    app = Application(api_key="SECRET-KEY")
    rows = [{"id": "a", "prompt": "SECRET-PROMPT" * 9}, {"id": "b", "prompt": "SECRET-PROMPT"}]
    with caplog.at_level(logging.DEBUG, logger="wllm_ray"):
        await post(app, body(rows=rows), Authorization="Bearer SECRET-KEY")
        await post(app, body(rows=rows), Authorization="Bearer SECRET-KEY-2")
    assert "SECRET" not in caplog.text


@pytest.mark.requirement("R-3")
async def test_a_replica_that_goes_once_is_not_noticed_by_the_caller():
    app = Application()
    capture, left = app.service._backend.capture, [1]

    async def flaky(task, *, alone):
        if left:
            left.pop()
            raise UnavailableError("gone", code="replica_lost")
        return await capture(task, alone=alone)

    app.service._backend.capture = flaky
    answer = (await post(app, body())).json()
    assert [row["failure"] for row in answer["rows"]] == [None, None]


@pytest.mark.requirement("D-7")
async def test_chunks_of_different_engines_are_not_mixed_in_one_answer():
    app = Application()
    capture = app.engine.capture
    other = fake_description().fingerprint.model_copy(update={"engine_version": "2"})

    def alternate(task):
        description = (
            fake_description(fingerprint=other) if app.engine.tasks else fake_description()
        )
        app.engine.description = description
        return capture(task)

    app.engine.capture = alternate
    error = error_of(await post(app, body(batch_size=1)), 500)
    assert error["code"] == "capture_failed"
    assert "2 engines that may differ numerically" in error["message"]


@pytest.mark.requirement("H-5", "H-7")
async def test_probes_stay_open_under_a_route_prefix():
    app = Application(api_key="secret")
    transport = httpx.ASGITransport(app=app, root_path="/two")
    async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
        for probe in ("/two/livez", "/two/readyz"):
            assert (await client.get(probe)).status_code == 200, probe
        assert (await client.get("/two/v1/models")).status_code == 401


@pytest.mark.requirement("R-2")
async def test_callers_that_leave_do_not_get_past_the_bound_on_datasets(tmp_path):
    app = Application(open_store(tmp_path), limits=ExtractionLimits(max_jobs=2))
    app.engine.delay_s = 0.5
    calls = []
    for name in ("a", "b"):
        payload = body(persistence="dataset", dataset_id=name)
        calls.append(asyncio.create_task(post(app, payload)))
        await asyncio.sleep(0.1)
        calls[-1].cancel()
    error = error_of(await post(app, body(persistence="dataset", dataset_id="c")), 429)
    assert error["code"] == "overloaded"
    attached = await post(app, body(persistence="dataset", dataset_id="a"))
    assert attached.status_code == 200, "attaching to what runs already costs nothing"


@pytest.mark.requirement("H-7")
async def test_a_layer_that_no_model_has_is_an_ordinary_error():
    app = Application()
    content = b'{"model":"fake-model","rows":[{"id":"a","prompt":"x"}],"layers":[' + b"9" * 6000
    answer = await post(app, content + b"]}")
    assert answer.status_code == 422
    assert len(answer.content) < 2000


@pytest.mark.requirement("L-6")
async def test_rows_that_are_no_objects_are_listed_like_other_malformed_rows():
    app = Application()
    answer = await post(app, body(rows=[1, {"id": "a", "prompt": "x"}, "two"]))
    error = error_of(answer, 422)
    assert error["code"] == "invalid_rows"
    assert [one["line"] for one in error["details"]["problems"]] == [1, 3]
    many = await post(app, body(rows=[1] * 100_000))
    assert many.status_code == 422
    assert len(many.content) < 20_000


async def test_accept_may_come_in_several_lines():
    app = Application()
    headers = [("accept", "text/html"), ("accept", "application/json")]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://a") as c:
        answer = await c.post("/v1/activation-datasets", json=body(), headers=headers)
    assert answer.status_code == 200

"""The Python client against a whole application, over ASGI or a loopback port."""

import ast
import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.fakes import (
    HIDDEN_SIZE,
    MODEL,
    Application,
    FakeEngine,
    FakeTokenizer,
    fake_activation,
    fake_description,
    fake_features,
    serving,
)
from wllm_ray.client import AsyncWLLMClient, WLLMClient
from wllm_ray.client.border import error_from_response, translated
from wllm_ray.client.connection import Connection
from wllm_ray.client.remote import Remote, check_answer, request_bodies
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.digest import canonical_json, parse_json
from wllm_ray.errors import (
    ERROR_CODES,
    CaptureError,
    InvalidInputError,
    NotFoundError,
    NotOfferedError,
    OverloadedError,
    RowsFailedError,
    TooLargeError,
    UnauthorizedError,
    UnavailableError,
    WLLMError,
    error_class,
)
from wllm_ray.extraction import ExtractionLimits
from wllm_ray.inputs import as_list, input_rows
from wllm_ray.plan import ShardLimits
from wllm_ray.records import CaptureIdentity, Chunk, InputRow, RowFailure
from wllm_ray.requests import select
from wllm_ray.schema import ActivationResponse, ExtractionSchema, StorageOptions
from wllm_ray.sites import HookSite, parse_site
from wllm_ray.tokens import make_records

SOURCES = Path(__file__).resolve().parents[2]
IDENTITY = CaptureIdentity(
    model_revision="m",
    tokenizer_revision="t",
    chat_template_sha256=None,
    sites=("L0_resid_post",),
    position="last_prompt",
    capture_mode="replay",
)


def client_of(app, *, base_url="http://app", **options) -> WLLMClient:
    options.setdefault("patience", 0)
    return WLLMClient(base_url, transport=httpx.ASGITransport(app), **options)


def ids_of(text: str) -> np.ndarray:
    return np.array(list(text.encode()), np.int32)


# --- inputs ---------------------------------------------------------------------------------------


@pytest.mark.requirement("P-1")
def test_strings_messages_token_ids_and_arrays_become_rows():
    messages = [{"role": "user", "content": "hi"}]
    inputs = ["text", messages, [1, 2], (3,), np.array([4, 5], np.int64), [np.int32(6)], []]
    contents = [row.content for row in input_rows(value for value in inputs)]
    assert contents == [
        {"prompt": "text"},
        {"messages": messages},
        {"token_ids": [1, 2]},
        {"token_ids": [3]},
        {"token_ids": [4, 5]},
        {"token_ids": [6]},
        {"token_ids": []},
    ]


def test_default_ids_are_numbered_and_metadata_is_kept_as_json():
    rows = input_rows(["a", "b"], metadata=[{"t": (1, 2)}, {"big": 10**5000, "float": 1.0}])
    assert [row.id for row in rows] == ["row-000000", "row-000001"]
    assert rows[0].metadata == {"t": [1, 2]}
    assert rows[1].metadata["big"] == 10**5000
    assert isinstance(rows[1].metadata["float"], float)


@pytest.mark.requirement("P-1")
def test_rows_are_taken_as_they_stand_in_a_file():
    rows = input_rows(
        [
            {"id": "a", "prompt": "text", "metadata": {"t": (1, 2)}},
            {"id": "b", "messages": ({"role": "user", "content": "hi"},)},
            {"id": "c", "token_ids": np.array([4, 5])},
        ]
    )
    assert [(row.id, row.content, row.metadata) for row in rows] == [
        ("a", {"prompt": "text"}, {"t": [1, 2]}),
        ("b", {"messages": [{"role": "user", "content": "hi"}]}, {}),
        ("c", {"token_ids": [4, 5]}, {}),
    ]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        (int, None, None),
        (int, 6, [6]),
        (int, np.int64(6), [6]),
        (int, range(2), [0, 1]),
        (int, np.array([1, 2]), [1, 2]),
        (str, "L1_resid_post", ["L1_resid_post"]),
        (str, ("a", "b"), ["a", "b"]),
    ],
)
def test_one_layer_or_site_is_a_list_of_one(kind, value, expected):
    assert as_list("layers", kind, value) == expected


@pytest.mark.parametrize(
    ("kind", "value"), [(int, "all"), (int, [1.5]), (int, True), (int, ["1"]), (str, 3), (str, [3])]
)
def test_layers_and_sites_of_another_type_are_refused(kind, value):
    with pytest.raises(InvalidInputError, match="`x` is a list of"):
        as_list("x", kind, value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("one string",), "put it into a list"),
        (([{"id": "a", "prompt": ""}], ["a"]), "carry their own ids and metadata"),
        (([{"id": "a", "prompt": ""}], None, [{}]), "carry their own ids and metadata"),
        (([{"id": "a", "prompt": ""}, "x"],), "input 1: expected a row like those beside it"),
        (([{"prompt": ""}],), "line 1: `id` is missing"),
        (([{"id": "a", "promt": ""}],), "unknown field 'promt'; did you mean 'prompt'"),
        (([{"id": "a", "token_ids": "x"}],), "`token_ids` must be a list of integers"),
        (([{"id": "a", "prompt": "x", "token_ids": [1]}],), "exactly one of"),
        (([b"bytes"],), "input 0: expected a string"),
        (([np.ones(2)],), "one-dimensional integer array"),
        (([np.ones((1, 2), int)],), "one-dimensional integer array"),
        ((["a", "b"], ["only one"]), "`row_ids` needs one entry per input: expected 2, found 1"),
        ((["a"], None, [{}, {}]), "`metadata` needs one entry per input"),
        ((["a"], None, [{"x": object()}]), "`metadata` holds something that JSON cannot say"),
        ((["a"], None, [{"x": float("nan")}]), "NaN"),
        ((["a", "b"], ["x", "x"]), "`id` was used before"),
        (([[1, "x"]],), "`token_ids` must be a list of integers"),
        (([],), "holds no rows"),
    ],
)
def test_inputs_that_cannot_be_are_refused_before_anything_is_sent(arguments, message):
    with pytest.raises(InvalidInputError, match=message):
        input_rows(*arguments)


# --- extraction -----------------------------------------------------------------------------------


@pytest.mark.requirement("P-1")
def test_activations_come_back_as_a_dataset():
    with client_of(Application()) as client:
        client.wait_until_ready(timeout=5)
        assert [card.id for card in client.models()] == [MODEL]
        dataset = client.extract_activations(
            MODEL, ["one", "two"], metadata=[{"label": 1}, {"label": 0}], layers=[2]
        )
    assert dataset.features.shape == (2, HIDDEN_SIZE)
    expected = fake_features(ids_of("two"), [HookSite(2, "resid_post")])
    assert np.array_equal(dataset.features[1], expected[0])
    assert dataset.row_ids == ["row-000000", "row-000001"]
    assert dataset.metadata == [{"label": 1}, {"label": 0}]
    assert dataset.manifest.sites == ("L2_resid_post",)
    assert dataset.verify().ok


@pytest.mark.requirement("P-1", "D-3")
@pytest.mark.parametrize("batch_size", ["auto", 1, 3])
def test_a_dataset_built_here_has_the_digest_of_one_that_the_server_commits(tmp_path, batch_size):
    store = open_store(tmp_path)
    limits = ExtractionLimits(shard=ShardLimits(max_rows=4))
    inputs = [f"prompt {number}" for number in range(9)]
    inputs[3] = "too long " * 20
    inputs[4:8] = [[9999]] * 4  # one whole shard that never reaches an engine
    options = {"layers": [0, 3], "sites": ["L1_resid_pre"], "batch_size": batch_size}
    with client_of(Application(store, limits=limits), artifact_root=tmp_path) as client:
        here = client.extract_activations(MODEL, inputs, **options)
        there = client.extract_activations(MODEL, inputs, persist=True, **options)
    assert here.manifest.content_sha256 == there.manifest.content_sha256
    assert here.manifest.dataset_id == there.manifest.dataset_id
    assert here.request_digests == there.request_digests
    assert [list(ids) for ids in here.token_ids] == [list(ids) for ids in there.token_ids]
    assert np.array_equal(here.features_3d, there.features_3d)
    assert here.failures == there.failures
    assert here.failures["row-000003"].code == "too_long"
    assert load_dataset(store, there.manifest.dataset_id).verify().ok


def activation(text: str, place: int, site: HookSite, width: int = HIDDEN_SIZE) -> np.ndarray:
    return fake_activation(ids_of(text)[: place + 1], site, width)


@pytest.mark.requirement("P-1", "C-8")
@pytest.mark.parametrize("persist", [False, True])
def test_all_tokens_of_each_input_come_back_with_offsets(tmp_path, persist):
    app = Application(open_store(tmp_path))
    with client_of(app, artifact_root=tmp_path) as client:
        dataset = client.extract_activations(
            MODEL, ["one", "", "four"], layers=1, position="all_prompt", persist=persist
        )
    assert dataset.features.shape == (7, HIDDEN_SIZE)
    assert dataset.offsets.tolist() == [0, 3, 7]
    assert dataset.row_ids == ["row-000000", "row-000002"]
    site = HookSite(1, "resid_post")
    second = dataset.features[dataset.offsets[1] : dataset.offsets[2]]
    assert np.array_equal(second, np.stack([activation("four", n, site) for n in range(4)]))


@pytest.mark.requirement("P-1", "C-8")
def test_chosen_tokens_come_back_in_the_order_asked_for():
    with client_of(Application()) as client:
        dataset = client.extract_activations(
            MODEL, ["one", "x", "four"], layers=[1], position={"index": [-1, 1]}
        )
    assert dataset.manifest.position == "index:-1,1"
    assert dataset.failures["row-000001"].code == "position_out_of_range"
    site = HookSite(1, "resid_post")
    expected = [activation("one", 2, site), activation("one", 1, site)]
    assert np.array_equal(dataset.features[:2], np.stack(expected))
    assert dataset.offsets.tolist() == [0, 2, 4]


@pytest.mark.requirement("P-1", "D-1")
@pytest.mark.parametrize("persist", [False, True])
def test_sites_of_unequal_width_are_read_one_by_one(tmp_path, persist):
    app = Application(open_store(tmp_path))
    widths = {"L1_resid_post": HIDDEN_SIZE, "L1_attn_out_prelinear": 12, "embed": HIDDEN_SIZE}
    with client_of(app, artifact_root=tmp_path) as client:
        dataset = client.extract_activations(
            MODEL, ["one", "two"], sites=list(widths), position="all_prompt", persist=persist
        )
    for name, width in widths.items():
        site = parse_site(name)
        expected = [activation(t, n, site, width) for t in ("one", "two") for n in range(3)]
        assert np.array_equal(dataset.site(name), np.stack(expected)), name
    with pytest.raises(NotOfferedError, match="L1_attn_out_prelinear"):
        _ = dataset.features_3d


@pytest.mark.requirement("P-1", "D-1", "D-3")
@pytest.mark.parametrize("position", ["all_prompt", "index:0,-1", "mean_prompt"])
@pytest.mark.parametrize("layout", ["auto", "per_site"])
def test_a_ragged_dataset_has_one_digest_wherever_it_is_built(tmp_path, layout, position):
    limits = ExtractionLimits(shard=ShardLimits(max_rows=5, max_bytes=80 * 2 * HIDDEN_SIZE * 4))
    stored = {"shard_layout": layout, "shard_format": "arrow", "storage_dtype": "float16"}
    storage = StorageOptions(**stored if layout == "per_site" else {"shard_layout": layout})
    options = {"layers": [0, 3], "position": position, "storage": storage, "batch_size": 3}
    inputs = [f"prompt {'x' * n}" for n in range(9)] + ["", [1, 2, 3], [1] * 99]
    app = Application(open_store(tmp_path), limits=limits)
    with client_of(app, artifact_root=tmp_path) as client:
        here = client.extract_activations(MODEL, inputs, **options)
        there = client.extract_activations(MODEL, inputs, persist=True, **options)
    assert here.manifest.content_sha256 == there.manifest.content_sha256
    assert here.manifest.dataset_id == there.manifest.dataset_id
    assert here.manifest.shard_layout == ("per_site" if layout == "per_site" else "stacked")
    assert len(here.manifest.shards) > 1
    assert here.offsets.tolist() == there.offsets.tolist()
    assert np.array_equal(here.features_3d, there.features_3d)
    assert set(here.failures) == {"row-000009", "row-000011"}


@pytest.mark.requirement("P-1", "H-2")
def test_ragged_answers_are_cut_to_the_bounds_of_the_server():
    bound = 70 * HIDDEN_SIZE * 4  # one row of the longest kind fits, two do not
    app = Application(limits=ExtractionLimits(max_inline_bytes=bound))
    with client_of(app) as client:
        dataset = client.extract_activations(
            MODEL, ["x" * 60] * 5, layers=[0], position="all_prompt"
        )
    assert dataset.offsets.tolist() == [0, 60, 120, 180, 240, 300]
    assert [method for method, _ in app.requests].count("POST") == 5


@pytest.mark.requirement("P-1", "C-8")
@pytest.mark.parametrize(
    ("position", "kind", "said"),
    [
        ("everywhere", InvalidInputError, "cannot read position 'everywhere'"),
        ({"index": []}, InvalidInputError, "cannot read position"),
        ({"idx": [0]}, InvalidInputError, "cannot read position"),
        ("last_generated", NotOfferedError, "needs generation"),
    ],
)
def test_positions_that_cannot_be_are_refused_before_anything_is_sent(position, kind, said):
    app = Application()
    with client_of(app) as client, pytest.raises(kind, match=said):
        client.extract_activations(MODEL, ["a"], layers=[0], position=position)
    assert all(method == "GET" for method, _ in app.requests)


@pytest.mark.requirement("P-1")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"site_widths": (9,)}, "L0_resid_post × 9 at first, found sites L0_resid_post × 8"),
        ({"position": "last_prompt"}, "at last_prompt, found sites L0_resid_post × 8 at first"),
    ],
)
async def test_an_answer_about_something_else_is_a_protocol_error(change, said):
    connection = Connection("http://app", transport=httpx.ASGITransport(Application()))
    card = await connection.model(MODEL)
    asked = select(card, layers=[0], site="block", sites=None, position="first")
    schema = await connection.get("/v1/extraction-schema", ExtractionSchema)
    remote = Remote(connection, card, asked, schema)
    remote._selection = replace(asked, **change)
    source = InputRow("a", {"prompt": "x"})
    row = next(make_records([source], asked.identity))._replace(source=source)
    with pytest.raises(CaptureError, match=said):
        await remote.capture(Chunk(0, (row,)))
    await connection.close()


@pytest.mark.requirement("P-1", "C-3")
@pytest.mark.parametrize("length", [0, 2, 4])
async def test_an_answer_with_another_number_of_feature_rows_is_a_protocol_error(length):
    connection = Connection("http://app", transport=httpx.ASGITransport(Application()))
    asked = select(
        await connection.model(MODEL), layers=[0], site="block", sites=None, position="all_prompt"
    )
    row = next(make_records([InputRow("a", {"prompt": "xyz"})], asked.identity))
    request = {"model": MODEL, "layers": [0], "position": "all_prompt"}
    body = canonical_json(request | {"rows": [{"id": "a", "prompt": "xyz"}]})
    answer = await connection.post("/v1/activation-datasets", body, accept="application/json")
    response = connection.parse(answer, ActivationResponse)
    check_answer([row], response, asked)
    lying = [response.rows[0].model_copy(update={"length": length})]
    with pytest.raises(CaptureError, match=f"3 tokens with 3 feature rows, found {length}"):
        check_answer([row], response.model_copy(update={"rows": lying}), asked)
    await connection.close()


@pytest.mark.requirement("P-1", "H-2")
def test_answers_are_cut_to_the_bounds_of_the_server():
    row_bytes = HIDDEN_SIZE * 4
    app = Application(limits=ExtractionLimits(max_inline_bytes=3 * row_bytes), max_body_bytes=1500)
    with client_of(app) as client:
        prompts = [f"{number}" * 20 for number in range(25)]
        dataset = client.extract_activations(MODEL, prompts, layers=[0])
    posts = [path for method, path in app.requests if method == "POST"]
    assert len(dataset) == 25
    assert len(posts) >= 9
    assert app.engine.captured.total() == 25


def test_request_bodies_keep_both_bounds_and_lose_no_row():
    sources = [InputRow(f"r{n}", {"prompt": "x" * (40 * n)}, f'{{"n":{n}}}') for n in range(12)]
    rows = list(make_records(sources, IDENTITY))
    counted = [(row, source, 1 + row.index % 3) for row, source in zip(rows, sources, strict=True)]
    parts = list(request_bodies({"model": "m"}, counted, max_feature_rows=4, max_bytes=400))
    assert [row.id for part, _ in parts for row in part] == [row.id for row in rows]
    assert max(sum(1 + row.index % 3 for row in part) for part, _ in parts) == 4
    for part, body in parts:
        assert len(body) <= 400 or len(part) == 1
        value = parse_json(body)
        assert value["model"] == "m"
        assert [row["id"] for row in value["rows"]] == [row.id for row in part]


async def test_the_async_client_is_the_same_client():
    app = Application()
    transport = httpx.ASGITransport(app)
    async with AsyncWLLMClient("http://app", transport=transport) as client:
        await client.wait_until_ready(5)
        first, second = await asyncio.gather(
            client.extract_activations(MODEL, ["a"], layers=[0]),
            client.extract_activations(MODEL, [[98]], sites=["L0_resid_post"]),
        )
    assert np.array_equal(
        first.features[0], fake_features(ids_of("a"), [HookSite(0, "resid_post")])[0]
    )
    assert second.token_ids[0].tolist() == [98]


async def test_the_blocking_client_works_where_a_loop_is_running():
    with client_of(Application()) as client:
        assert client.models()[0].id == MODEL


def test_the_blocking_client_has_the_signatures_and_documentation_of_the_async_one():
    assert WLLMClient.extract_activations.__doc__ == AsyncWLLMClient.extract_activations.__doc__
    assert WLLMClient.wait_until_ready.__name__ == "wait_until_ready"


@pytest.mark.requirement("P-1")
def test_persisting_needs_the_storage_root_and_says_so():
    with (
        client_of(Application()) as client,
        pytest.raises(InvalidInputError, match="artifact_root"),
    ):
        client.extract_activations(MODEL, ["a"], layers=[0], persist=True)


def test_another_root_than_the_servers_is_found_out(tmp_path):
    app = Application(open_store(tmp_path / "a"))
    with client_of(app, artifact_root=tmp_path / "a") as client:
        client.extract_activations(MODEL, ["a"], layers=[0], persist=True, dataset_id="one")
    other = Application(
        open_store(tmp_path / "b"), engine=FakeEngine(fake_description(versions={"fake": "2"}))
    )
    with (
        client_of(other, artifact_root=tmp_path / "a") as client,
        pytest.raises(WLLMError, match="artifact_root is not the application's storage root"),
    ):
        client.extract_activations(MODEL, ["a"], layers=[0], persist=True, dataset_id="one")


@pytest.mark.requirement("D-10")
def test_rows_that_may_pass_are_tried_again_and_then_named():
    attempts = []

    def fault(row):
        if row.token_ids.tolist() == [120]:
            attempts.append(row.index)
            return RowFailure.of("position_missing", "lost")
        return None

    with (
        client_of(Application(engine=FakeEngine(fault=fault))) as client,
        pytest.raises(
            RowsFailedError, match="1 of 2 rows failed for reasons that may pass"
        ) as caught,
    ):
        client.extract_activations(MODEL, ["x", "y"], layers=[0])
    assert len(attempts) == 3
    assert caught.value.details["failures"][0]["id"] == "row-000000"


def test_an_unknown_model_is_named_together_with_what_is_served():
    with (
        client_of(Application()) as client,
        pytest.raises(NotFoundError, match="served: 'fake-model'"),
    ):
        client.extract_activations("nope", ["a"], layers=[0])


def test_a_row_that_the_server_understood_otherwise_is_a_protocol_error():
    app = Application()
    moved = app.engine.description.model.model_copy(update={"revision": "sha256:" + "9" * 64})
    app.before = lambda _method, path: (
        setattr(app.service, "description", fake_description(model=moved))
        if path == "/v1/activation-datasets"
        else None
    )
    with client_of(app) as client, pytest.raises(CaptureError, match="request digest") as caught:
        client.extract_activations(MODEL, ["a"], layers=[0])
    assert caught.value.code == "protocol_error"


# --- errors and retries ---------------------------------------------------------------------------


def subclasses(kind):
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)


FOREIGN = [
    kind
    for root in (httpx.HTTPError, httpx.InvalidURL, httpx.CookieConflict, httpx.StreamError)
    for kind in (root, *subclasses(root))
    if kind.__module__.startswith("httpx")
]


def foreign(kind):
    if kind is httpx.HTTPStatusError:
        return kind("x", request=httpx.Request("GET", "http://x"), response=httpx.Response(500))
    try:
        return kind("secret text")
    except TypeError:
        return kind()


@pytest.mark.requirement("P-1")
@pytest.mark.parametrize("kind", FOREIGN, ids=lambda kind: kind.__name__)
def test_no_exception_of_the_http_library_leaves_unmapped(kind):
    with pytest.raises(WLLMError) as caught, translated("http://app"):
        raise foreign(kind)
    assert type(caught.value) is not WLLMError
    assert isinstance(caught.value.__cause__, kind)
    assert "secret" not in caught.value.message


def test_the_list_of_foreign_exceptions_is_complete():
    public = {
        value
        for value in vars(httpx).values()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert public <= set(FOREIGN)


@pytest.mark.requirement("H-7")
@pytest.mark.parametrize("code", sorted(ERROR_CODES))
def test_every_code_comes_back_as_the_class_that_raises_it(code):
    sent = error_class(code)("what happened", code=code, stage="capture", details={"a": [1]})
    response = httpx.Response(
        sent.http_status,
        content=canonical_json(sent.to_json()),
        request=httpx.Request("GET", "http://app"),
    )
    got = error_from_response(response)
    assert type(got) is type(sent)
    assert (got.code, got.message, got.stage, got.details) == (
        code, "what happened", "capture", {"a": [1]}
    )  # fmt: skip


def raised_in_sources():
    """(class name, code) of every exception that the sources build with a literal code."""
    for path in (SOURCES / "wllm_ray").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            for keyword in node.keywords:
                is_literal = keyword.arg == "code" and isinstance(keyword.value, ast.Constant)
                if is_literal and node.func.id.endswith("Error"):
                    yield node.func.id, keyword.value.value


def test_codes_map_to_the_classes_that_the_sources_raise_them_with():
    wrong = {
        (name, code) for name, code in raised_in_sources() if error_class(code).__name__ != name
    }
    assert not wrong


def test_only_internal_error_maps_to_the_base_class():
    assert {code for code in ERROR_CODES if error_class(code) is WLLMError} == {"internal_error"}


@pytest.mark.requirement("H-7")
@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (429, OverloadedError, "overloaded"),
        (503, UnavailableError, "not_ready"),
        (500, UnavailableError, "replica_lost"),
        (408, UnavailableError, "deadline_exceeded"),
        (504, UnavailableError, "deadline_exceeded"),
        (401, UnauthorizedError, "unauthorized"),
        (404, NotFoundError, "route_not_found"),
        (413, TooLargeError, "body_too_large"),
        (302, CaptureError, "protocol_error"),
        (418, CaptureError, "protocol_error"),
    ],
)
@pytest.mark.parametrize("body", [b"plain text, secret", b"", b'{"error": "secret"}', b"[1]"])
def test_answers_of_a_proxy_are_mapped_by_status_and_not_quoted(status, kind, code, body):
    response = httpx.Response(
        status,
        content=body,
        headers={"retry-after": "7"},
        request=httpx.Request("GET", "http://u:pw@app/x"),
    )
    error = error_from_response(response)
    assert type(error) is kind
    assert error.code == code
    assert error.details["retry_after_s"] == 7
    assert "secret" not in error.message
    assert "pw" not in error.message


def test_a_code_of_a_newer_server_keeps_its_meaning_by_status():
    body = canonical_json({"error": {"code": "from_the_future", "message": "m"}})
    response = httpx.Response(429, content=body, request=httpx.Request("GET", "http://app"))
    error = error_from_response(response)
    assert type(error) is OverloadedError
    assert error.details["server_code"] == "from_the_future"


@pytest.mark.requirement("P-1")
@pytest.mark.parametrize("status", [429, 500, 503])
def test_requests_that_nobody_took_are_sent_again(status):
    app = Application()
    left = [status, status]
    app.before = lambda method, _path: (
        (left.pop(), {"retry-after": "0"}, b"busy") if method == "POST" and left else None
    )
    with client_of(app, patience=20) as client:
        assert len(client.extract_activations(MODEL, ["a"], layers=[0])) == 1
    assert not left
    assert app.engine.tasks == 1


@pytest.mark.parametrize("status", [408, 413, 422, 404, 401])
def test_other_answers_are_not_asked_for_again(status):
    app = Application()
    app.before = lambda method, _path: (status, {}, b"no") if method == "POST" else None
    with client_of(app, patience=20) as client, pytest.raises(WLLMError):
        client.extract_activations(MODEL, ["a"], layers=[0])
    assert [method for method, _ in app.requests].count("POST") <= 3


async def test_waiting_honours_retry_after():
    app = Application()
    answers = [(503, {"retry-after": "1"}, b"")]
    app.before = lambda _method, _path: answers.pop() if answers else None
    connection = Connection("http://app", patience_s=10, transport=httpx.ASGITransport(app))
    started = asyncio.get_running_loop().time()
    await connection.models()
    assert asyncio.get_running_loop().time() - started >= 0.7
    await connection.close()


def test_patience_ends():
    app = Application()
    app.before = lambda _method, _path: (503, {"retry-after": "5"}, b"")
    with client_of(app, patience=1) as client, pytest.raises(UnavailableError):
        client.models()
    assert len(app.requests) == 1, "a wait that goes past the end is not begun"


@pytest.mark.requirement("H-7")
def test_the_key_is_sent_and_a_wrong_one_is_refused():
    app = Application(api_key="right")
    with client_of(app, api_key="right") as client:
        assert client.models()
    with client_of(app, api_key="wrong") as client, pytest.raises(UnauthorizedError) as caught:
        client.models()
    assert "wrong" not in str(caught.value)


def test_nobody_at_the_address():
    with (
        WLLMClient("http://127.0.0.1:9", patience=0) as client,
        pytest.raises(
            UnavailableError, match=r"no answer from http://127\.0\.0\.1:9/v1/models"
        ) as caught,
    ):
        client.models()
    assert caught.value.code == "server_unreachable"
    assert isinstance(caught.value.__cause__, httpx.ConnectError)


@pytest.mark.parametrize("address", ["ftp://app", "http://app:port", "app:8000"])
def test_an_address_that_cannot_be(address):
    with (
        pytest.raises(InvalidInputError, match="expected an address"),
        WLLMClient(address) as client,
    ):
        client.models()


def test_another_service_at_the_address():
    async def other(_scope, _receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"<html>hello"})

    with client_of(other) as client, pytest.raises(CaptureError, match="versions may differ"):
        client.models()


def test_waiting_says_what_was_seen_last():
    app = Application()
    app.service.description = None
    with client_of(app) as client, pytest.raises(UnavailableError, match="no replica has passed"):
        client.wait_until_ready(timeout=0.1)


def test_over_a_real_port():
    with serving(Application()) as address, WLLMClient(address) as client:
        assert len(client.extract_activations(MODEL, ["a", "b"], layers=[1])) == 2


def test_constructing_reads_no_environment(monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("WLLM_API_KEY", "from the environment")
    app = Application(api_key="other")
    with serving(app) as address, WLLMClient(address, api_key="other") as client:
        assert client.models()


def test_a_tokenizer_without_template_fails_only_its_rows():
    app = Application(tokenizer=FakeTokenizer(has_template=False))
    app.service.description = fake_description(tokenizer=FakeTokenizer(has_template=False).identity)
    with client_of(app) as client:
        dataset = client.extract_activations(
            MODEL, ["a", [{"role": "user", "content": "b"}]], layers=[0]
        )
    assert dataset.row_ids == ["row-000000"]
    assert dataset.failures["row-000001"].code == "no_chat_template"

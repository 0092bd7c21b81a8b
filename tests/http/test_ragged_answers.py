"""Positions, rows of several feature rows, and sites of unequal width, over HTTP."""

import dataclasses
import io

import numpy as np
import pytest

from tests.fakes import (
    ATTENTION_LAYERS,
    HIDDEN_SIZE,
    LAYER_TYPES,
    MODEL,
    NUM_LAYERS,
    Application,
    FakeEngine,
    fake_activation,
    fake_description,
)
from tests.http.calls import body, caller, error_of, post
from wllm_ray.dataset.reading.reader import load_dataset
from wllm_ray.dataset.stores.store import open_store
from wllm_ray.errors import NotOfferedError
from wllm_ray.extraction import ExtractionLimits
from wllm_ray.records import RowFailure
from wllm_ray.requests import read_request
from wllm_ray.schema import ActivationResponse, ExtractionSchema, ModelList
from wllm_ray.sites import HookSite, parse_site
from wllm_ray.wire import ARROW_STREAM, NPY, decode_arrow

TEXTS = {"a": "one", "b": "four"}
ROWS = [
    {"id": "a", "prompt": "one"},
    {"id": "none", "prompt": ""},
    {"id": "b", "prompt": "four"},
]
# One of the model's width, and two of others.
UNEQUAL = {"L1_resid_post": 8, "L1_attn_out_prelinear": 12, "L3_attn_out_prelinear": 16}


def at(text: str, place: int, site: str = "L1_resid_post", width: int = HIDDEN_SIZE):
    """What the fake engine has at one token of a text."""
    ids = np.array(list(text.encode())[: place + 1], np.int32)
    return fake_activation(ids, parse_site(site), width)


# --- positions ------------------------------------------------------------------------------------


@pytest.mark.requirement("C-8", "H-1")
@pytest.mark.parametrize(
    ("position", "stored", "places"),
    [
        ("last_prompt", "last_prompt", ([2], [3])),
        ("last-prompt", "last_prompt", ([2], [3])),
        ("first", "first", ([0], [0])),
        ("all_prompt", "all_prompt", ([0, 1, 2], [0, 1, 2, 3])),
        ("index:0,-1", "index:0,-1", ([0, 2], [0, 3])),
        ({"index": [-1, 0, 1]}, "index:-1,0,1", ([2, 0, 1], [3, 0, 1])),
        ({"index": [-1]}, "index:-1", ([2], [3])),
    ],
)
async def test_each_row_has_the_positions_that_were_asked_for(position, stored, places):
    response = await post(Application(), body(rows=ROWS, position=position))
    answer = ActivationResponse.model_validate_json(response.content)
    first, second = places
    assert answer.position == stored
    assert [row.length for row in answer.rows] == [len(first), 0, len(second)]
    assert [row.offset for row in answer.rows] == [0, None, len(first)]
    assert answer.shape == (len(first) + len(second), 1, HIDDEN_SIZE)
    expected = [at("one", place) for place in first] + [at("four", place) for place in second]
    assert np.array_equal(np.array(answer.features, np.float32)[:, 0], np.stack(expected))


@pytest.mark.requirement("C-8")
async def test_the_mean_is_one_feature_row_per_row():
    answer = (await post(Application(), body(rows=ROWS, position="mean_prompt"))).json()
    assert [row["length"] for row in answer["rows"]] == [1, 0, 1]
    for (row,), text in zip(answer["features"], TEXTS.values(), strict=True):
        every = np.stack([at(text, place) for place in range(len(text))])
        assert np.allclose(row, every.mean(axis=0, dtype=np.float64), rtol=1e-6)


@pytest.mark.requirement("C-8", "C-16")
@pytest.mark.parametrize("persistence", ["none", "dataset"])
async def test_a_row_without_the_position_fails_alone(tmp_path, persistence):
    app = Application(open_store(tmp_path))
    asked = body(rows=ROWS, position={"index": [0, 3]}, persistence=persistence)
    answer = (await post(app, asked)).json()
    failed, _, good = answer["rows"]
    assert (failed["length"], failed["offset"]) == (0, None)
    assert failed["failure"]["code"] == "position_out_of_range"
    assert (failed["failure"]["stage"], failed["failure"]["permanent"]) == ("tokenize", True)
    assert "index 3 is outside a row of 3 tokens (-3 to 2 would do)" in failed["failure"]["message"]
    assert (good["length"], good["offset"]) == (2, 0)
    assert set(app.engine.captured) == {tuple(b"four")}, "the other one was not run"


@pytest.mark.requirement("H-2")
@pytest.mark.parametrize("position", ["all_prompt", {"index": [0, -1]}])
async def test_json_arrow_and_npy_of_ragged_rows_agree_to_the_bit(position):
    app = Application()
    rows = [row for row in ROWS if row["prompt"]]
    request = body(rows=rows, position=position, layers=[0, 3], sites=["embed"])
    arrow = decode_arrow((await post(app, request, accept=ARROW_STREAM)).content)
    npy = np.load(io.BytesIO((await post(app, request, accept=NPY)).content), allow_pickle=False)
    plain = (await post(app, request)).json()
    assert npy.shape == (sum(row.length for row in arrow.response.rows), 3, HIDDEN_SIZE)
    assert arrow.stacked().tobytes() == npy.tobytes()
    assert np.array(plain["features"], np.float32).tobytes() == npy.tobytes()
    assert plain["rows"] == [row.model_dump(mode="json") for row in arrow.response.rows]


@pytest.mark.requirement("H-1")
async def test_a_row_that_fails_on_the_way_leaves_no_hole_between_ragged_rows():
    lost = RowFailure.of("hook_failed", "x")
    engine = FakeEngine(fault=lambda row: lost if row.index == 0 else None)
    rows = [{"id": f"r{n}", "prompt": "x" * (n + 1)} for n in range(4)]
    answer = (await post(Application(engine=engine), body(rows=rows, position="all_prompt"))).json()
    assert [row["length"] for row in answer["rows"]] == [0, 2, 3, 4]
    assert [row["offset"] for row in answer["rows"]] == [None, 0, 2, 5]
    assert np.array_equal(np.array(answer["features"][2][0], np.float32), at("xxx", 0))


@pytest.mark.requirement("C-3", "H-1")
@pytest.mark.parametrize("change", [-1, 1])
async def test_a_row_with_too_few_or_too_many_feature_rows_never_leaves(change):
    app = Application()
    capture = app.engine.capture

    def lying(task):
        chunk = capture(task)
        return dataclasses.replace(chunk, lengths=chunk.lengths + np.array([change, -change]))

    app.engine.capture = lying
    rows = [row for row in ROWS if row["prompt"]]
    error = error_of(await post(app, body(rows=rows, position="all_prompt")), 500)
    assert error["code"] == "capture_failed"
    assert f"row 0 came back with {3 + change} feature rows" in error["message"]


@pytest.mark.requirement("H-2")
async def test_the_bound_of_an_inline_answer_counts_feature_rows():
    bound = ExtractionLimits(max_inline_bytes=7 * HIDDEN_SIZE * 4)
    app = Application(limits=bound)
    fits = await post(app, body(rows=ROWS, position="all_prompt"))
    assert fits.json()["shape"] == [7, 1, HIDDEN_SIZE], "a row that cannot be run takes no room"
    ran = app.engine.tasks
    longer = [*ROWS, {"id": "c", "prompt": "x"}]
    error = error_of(await post(app, body(rows=longer, position="all_prompt")), 413)
    assert error["details"] == {"bytes": 8 * 32, "max_inline_bytes": 7 * 32}
    assert "8 feature rows of 32" in error["message"]
    assert app.engine.tasks == ran


# --- sites of unequal width -----------------------------------------------------------------------


@pytest.mark.requirement("H-1", "H-2")
async def test_sites_of_unequal_width_stand_side_by_side_in_the_order_asked_for():
    app = Application()
    request = body(rows=ROWS, layers=None, sites=list(UNEQUAL), position="all_prompt")
    arrow = decode_arrow((await post(app, request, accept=ARROW_STREAM)).content)
    plain = (await post(app, request)).json()
    assert plain["axes"] == ["row", "site", "hidden"]
    assert plain["site_widths"] == list(UNEQUAL.values())
    assert plain["shape"] == [7, 3, None]
    assert arrow.features.shape == (7, 36)
    assert (arrow.response.site_widths, arrow.response.shape) == ((8, 12, 16), (7, 3, None))
    for number, (site, width) in enumerate(UNEQUAL.items()):
        every = [at(text, n, site, width) for text in TEXTS.values() for n in range(len(text))]
        expected = np.stack(every)
        assert np.array_equal(arrow.site(number), expected), site
        nested = np.array([row[number] for row in plain["features"]], np.float32)
        assert np.array_equal(nested, expected), site


@pytest.mark.requirement("H-2", "C-17")
async def test_npy_refuses_sites_of_unequal_width_before_anything_runs():
    app = Application()
    request = body(layers=None, sites=list(UNEQUAL))
    error = error_of(await post(app, request, accept=NPY), 422)
    assert error["code"] == "widths_not_representable"
    assert "L1_resid_post has 8, L1_attn_out_prelinear has 12" in error["message"]
    assert ARROW_STREAM in error["message"]
    assert app.engine.tasks == 0


# --- datasets -------------------------------------------------------------------------------------


@pytest.mark.requirement("H-1", "P-4")
@pytest.mark.parametrize("position", ["all_prompt", "index:0,-1", "mean_prompt"])
async def test_a_committed_ragged_dataset_is_what_the_inline_answer_says(tmp_path, position):
    app = Application(open_store(tmp_path))
    request = body(rows=ROWS, layers=[0, 2], position=position)
    inline = decode_arrow((await post(app, request, accept=ARROW_STREAM)).content)
    kept = {"persistence": "dataset", "dataset_id": "d", "rows_per_shard": 2}
    for _ in range(2):  # the second answer is about what is there already
        answer = (await post(app, request | kept)).json()
        assert answer["rows"] == [row.model_dump(mode="json") for row in inline.response.rows]
        assert tuple(answer["shape"]) == inline.response.shape
        assert answer["dataset"]["shards"] == 2
    dataset = load_dataset(tmp_path, "d")
    assert np.array_equal(dataset.features_3d, inline.stacked())
    assert dataset.offsets.tolist() == [
        0,
        *np.cumsum([r.length for r in inline.response.rows if r.length]),
    ]


@pytest.mark.requirement("H-1", "D-1")
@pytest.mark.parametrize("layout", ["auto", "per_site"])
async def test_a_dataset_of_unequal_widths_has_a_file_per_site(tmp_path, layout):
    app = Application(open_store(tmp_path))
    request = body(rows=ROWS, layers=None, sites=list(UNEQUAL), position="all_prompt")
    kept = {"persistence": "dataset", "dataset_id": "d", "shard_layout": layout}
    answer = (await post(app, request | kept)).json()
    assert (answer["site_widths"], answer["shape"]) == ([8, 12, 16], [7, 3, None])
    dataset = load_dataset(tmp_path, "d", verify="full")
    assert np.array_equal(
        dataset.site("L3_attn_out_prelinear")[2], at("one", 2, "L3_attn_out_prelinear", 16)
    )
    assert len(list(tmp_path.glob("datasets/d/*.npy"))) == 3


@pytest.mark.requirement("D-1")
@pytest.mark.parametrize(("layout", "files"), [("auto", 1), ("stacked", 1), ("per_site", 2)])
async def test_the_layout_of_equally_wide_sites_is_the_callers_choice(tmp_path, layout, files):
    app = Application(open_store(tmp_path))
    kept = {"persistence": "dataset", "dataset_id": "d", "shard_layout": layout}
    assert (await post(app, body(layers=[0, 1]) | kept)).status_code == 200
    assert len(list(tmp_path.glob("datasets/d/*.npy"))) == files
    assert load_dataset(tmp_path, "d").site("L1_resid_post").shape == (2, HIDDEN_SIZE)


async def test_unequal_widths_are_not_stacked(tmp_path):
    app = Application(open_store(tmp_path))
    request = body(layers=None, sites=list(UNEQUAL), shard_layout="stacked", persistence="dataset")
    error = error_of(await post(app, request), 422)
    assert error["code"] == "widths_not_representable"
    assert "per_site" in error["message"]
    assert app.engine.tasks == 0


# --- what is offered ------------------------------------------------------------------------------


@pytest.mark.requirement("H-5")
async def test_the_support_matrix_names_every_site_with_its_width():
    async with caller(Application()) as client:
        answer = await client.get("/v1/extraction-schema")
    schema = ExtractionSchema.model_validate_json(answer.content)
    sites = {one.name: one for one in schema.sites}
    assert len(sites) == len(schema.sites) == 2 * NUM_LAYERS + 4 * 3 + 1 + 2
    assert (sites["L3_attn_out_prelinear"].width, sites["embed"].layer) == (16, None)
    assert all(str(HookSite(one.layer, one.kind)) == name for name, one in sites.items())
    assert schema.site_kinds["attn_out_prelinear"] == ATTENTION_LAYERS
    assert (schema.site_kinds["mamba_out"], schema.site_kinds["final_norm"]) == ((2,), None)
    assert schema.layer_types == LAYER_TYPES
    assert "index" in schema.positions
    assert (schema.depth_bounded, schema.precision) == (True, "native")
    assert schema.shard_layouts == ("auto", "stacked", "per_site")


@pytest.mark.requirement("H-5", "C-9")
async def test_every_site_of_the_support_matrix_can_be_captured_and_no_other():
    app = Application()
    async with caller(app) as client:
        schema = (await client.get("/v1/extraction-schema")).json()
    widths = {one["name"]: one["width"] for one in schema["sites"]}
    answer = (await post(app, body(layers=None, sites=list(widths)))).json()
    assert [len(site) for site in answer["features"][0]] == list(widths.values())
    for layer in range(NUM_LAYERS):
        for kind, layers in schema["site_kinds"].items():
            if layers is not None and layer not in layers:
                asked = body(layers=[layer], site=kind)
                assert error_of(await post(app, asked), 422)["code"] == "site_not_offered"


@pytest.mark.requirement("H-5")
async def test_a_models_card_holds_what_a_client_needs_to_plan():
    async with caller(Application()) as client:
        models = ModelList.model_validate_json((await client.get("/v1/models")).content)
    (card,) = models.data
    told = fake_description()
    assert (card.id, card.layer_types, card.sites) == (MODEL, told.layer_types, told.sites)
    assert (card.positions, card.depth_bounded) == (told.positions, True)


@pytest.mark.requirement("C-9")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"layers": [0, 1], "site": "mamba_out"},
            "L0_mamba_out does not exist: block 0 of FakeForCausalLM is 'attention + mlp'",
        ),
        ({"layers": [3], "site": "mamba_out"}, "mlp_out; blocks with mamba_out: 2"),
        ({"layers": [2], "site": "attn_out"}, "block 2 of FakeForCausalLM is 'mamba'"),
        ({"sites": ["L2_resid_mid"]}, "block 2 of FakeForCausalLM is 'mamba'"),
        (
            {"sites": ["L1_moe_out"]},
            "L1_moe_out is not offered on FakeForCausalLM, whose block 1 is 'attention + mlp'",
        ),
    ],
)
async def test_a_site_that_a_block_does_not_have_is_refused_with_the_blocks_type(changes, said):
    app = Application()
    error = error_of(await post(app, body(**changes)), 422)
    assert (error["code"], said in error["message"]) == ("site_not_offered", True), error["message"]
    assert app.engine.tasks == 0


@pytest.mark.requirement("C-17")
@pytest.mark.parametrize(
    ("field", "code", "instead"),
    [
        ("attention", "feature_not_offered", "ask for the sites attn_out"),
        ("output_attentions", "feature_not_offered", "ask for the sites attn_out"),
        ("interventions", "feature_not_offered", "intervene with a hook on the model"),
        ("steering", "feature_not_offered", "intervene with a hook on the model"),
        ("lora", "feature_not_offered", "merge the adapter into the weights"),
        ("lora_request", "feature_not_offered", "merge the adapter into the weights"),
        ("speculative_config", "feature_not_offered", "leave the field out"),
        ("tensor_parallel_size", "parallelism_not_offered", "serve more replicas"),
    ],
)
async def test_what_this_product_does_not_do_is_refused_with_what_to_do_instead(
    field, code, instead
):
    app = Application()
    asked = body(**{field: {"any": "value"}, "colour": 1})
    error = error_of(await post(app, asked), 422)
    assert (error["code"], error["details"]) == (code, {"field": field})
    assert error["message"].startswith(f"'{field}' is not offered: ")
    assert instead in error["message"]
    assert app.engine.tasks == 0
    with pytest.raises(NotOfferedError, match=instead):  # as a handle call reads it
        read_request(asked)


@pytest.mark.requirement("C-8", "C-17")
@pytest.mark.parametrize("position", ["all_generated", "last_generated"])
async def test_generated_positions_say_that_they_need_generation(position):
    error = error_of(await post(Application(), body(position=position)), 422)
    assert error["code"] == "position_not_offered"
    assert "it needs generation and only prompts are run here" in error["message"]
    assert "offered: last_prompt, first, all_prompt, mean_prompt, index" in error["message"]


@pytest.mark.requirement("C-8")
async def test_a_position_that_a_replica_does_not_capture_is_refused():
    engine = FakeEngine(fake_description(positions=("last_prompt",)))
    error = error_of(await post(Application(engine=engine), body(position="index:0")), 422)
    assert (error["code"], engine.tasks) == ("position_not_offered", 0)

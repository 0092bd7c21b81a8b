"""The interface of engines in this process, over a fake low-level engine with unlike sites."""

import asyncio
import gc
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from tests.fakes import (
    HIDDEN_SIZE,
    MAX_MODEL_LEN,
    NUM_LAYERS,
    FakeEngine,
    FakeTokenizer,
    fake_features,
)
from wllm_ray.engines import ActivationEngine, AutoBatch
from wllm_ray.engines.options import refuse
from wllm_ray.errors import CaptureError, InvalidInputError, NotOfferedError
from wllm_ray.records import RowFailure
from wllm_ray.sites import HookSite

PROMPTS = ["the sea", "a", "the long way home"]
WIDE = "L3_attn_out_prelinear"  # 16 wide, where the stream is 8


def opened(engine=None, *, tokenizer=None, **asked):
    return ActivationEngine(lambda: (engine or FakeEngine(), tokenizer or FakeTokenizer()), **asked)


@pytest.fixture
def low():
    return FakeEngine()


@pytest.fixture
def engine(low):
    with opened(low) as engine:
        yield engine


def wait_until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.005)


def ids(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def expected(texts, sites, position="last_prompt"):
    parsed = [HookSite.parse(site) for site in sites]
    return np.concatenate([fake_features(ids(text), parsed, position) for text in texts])


@pytest.mark.requirement("P-3")
def test_without_sites_the_stream_after_the_last_block_is_read(engine):
    found = engine.extract(PROMPTS)
    assert found.sites == (f"L{NUM_LAYERS - 1}_resid_post",)
    assert found.features.shape == (3, HIDDEN_SIZE)
    np.testing.assert_array_equal(found.features, expected(PROMPTS, found.sites))
    assert found.row_ids == ["row-000000", "row-000001", "row-000002"]
    assert found.failures == {}
    assert len(found) == 3


@pytest.mark.requirement("P-3")
@pytest.mark.parametrize(
    "asked",
    [
        {"sites": ["L1_resid_post", "embed"]},
        {"sites": iter(["blocks.1.hook_resid_post", HookSite(None, "embed")])},
        {"layers": 1, "sites": "embed"},
        {"layers": [1], "site": "resid_post", "sites": [HookSite(None, "embed")]},
    ],
)
def test_sites_are_named_in_any_accepted_way(asked):
    with opened(**asked) as engine:
        found = engine.extract(PROMPTS)
    assert found.sites == ("L1_resid_post", "embed")
    assert found.features.shape == (3, 2, HIDDEN_SIZE)
    np.testing.assert_array_equal(found.features[:, 1], found.site("embed"))


@pytest.mark.requirement("P-3", "C-8")
def test_ragged_rows_and_sites_of_unlike_width_stay_aligned(engine):
    sites = ["embed", WIDE, "L0_attn_out_prelinear"]
    found = engine.extract(PROMPTS, sites, "all_prompt")
    assert found.widths == (8, 16, 12)
    assert found.offsets.tolist() == [0, 7, 8, 8 + 17]
    assert [len(one) for one in found.token_ids] == [7, 1, 17]
    for name in sites:
        np.testing.assert_array_equal(found.site(name), expected(PROMPTS, [name], "all_prompt"))
    with pytest.raises(NotOfferedError, match=r"L3_attn_out_prelinear has 16.*\.site\('embed'\)"):
        _ = found.features
    with pytest.raises(InvalidInputError, match="L2_resid_post was not captured; captured: embed"):
        found.site("L2_resid_post")


@pytest.mark.requirement("P-3", "C-8")
def test_indices_are_given_as_a_mapping_and_told_as_text(engine):
    found = engine.extract(["abcd", "xyz"], "embed", {"index": [0, -1]})
    assert found.position == "index:0,-1"
    assert found.offsets.tolist() == [0, 2, 4]
    np.testing.assert_array_equal(
        found.features, expected(["abcd", "xyz"], ["embed"], "index:0,-1")
    )


@pytest.mark.requirement("P-3")
def test_every_kind_of_input_and_generators(engine):
    found = engine.extract(value for value in ("ab", [{"role": "user", "content": "x"}], [5, 6, 7]))
    assert [one.tolist() for one in found.token_ids] == [[97, 98], list(b"<U>x<A>"), [5, 6, 7]]
    rows = [
        {"id": "p", "prompt": "ab", "metadata": {"label": 1}},
        {"id": "t", "token_ids": np.array([5, 6])},
    ]
    found = engine.extract(rows)
    assert (found.row_ids, found.metadata) == (["p", "t"], [{"label": 1}, {}])
    found = engine.extract(["a", "b"], row_ids=["x", "y"], metadata=[{"n": 0}, {"n": 1.0}])
    assert (found.row_ids, found.metadata) == (["x", "y"], [{"n": 0}, {"n": 1.0}])


@pytest.mark.requirement("P-3", "C-16")
def test_rows_that_cannot_be_run_are_failures_and_the_rest_is_there(low):
    low.fault = lambda row: (
        RowFailure.of("non_finite", "NaN") if row.token_ids[0] == ord("!") else None
    )
    with opened(low) as engine:
        found = engine.extract(["ok", "", "!", [1, 999], "x" * (MAX_MODEL_LEN + 1), "fine"])
    assert found.row_ids == ["row-000000", "row-000005"]
    assert {name: (one.index, one.code) for name, one in found.failures.items()} == {
        "row-000001": (1, "empty_prompt"),
        "row-000002": (2, "non_finite"),
        "row-000003": (3, "token_out_of_vocabulary"),
        "row-000004": (4, "too_long"),
    }
    np.testing.assert_array_equal(found.features, expected(["ok", "fine"], found.sites))


@pytest.mark.requirement("P-3", "C-16")
def test_an_input_of_failures_alone_gives_empty_arrays(engine):
    found = engine.extract(["", ""], [WIDE])
    assert found.features.shape == (0, 16)
    assert found.offsets.tolist() == [0]
    assert len(found.failures) == 2


@pytest.mark.requirement("P-3")
def test_malformed_inputs_run_nothing(engine, low):
    with pytest.raises(InvalidInputError, match="used before"):
        engine.extract([{"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"}])
    with pytest.raises(InvalidInputError, match="put it into a list"):
        engine.extract("a prompt")
    assert low.tasks == 0


@pytest.mark.requirement("P-3")
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"sites": "L0_rezid_post"}, "rezid_post"),
        ({"position": "middle"}, "cannot read position"),
        ({"sites": 5}, "`sites` is a list of hook sites"),
    ],
)
def test_what_no_model_has_is_refused_before_one_is_loaded(asked, message):
    def load():
        raise AssertionError("nothing is loaded for this")

    with pytest.raises(InvalidInputError, match=message):
        ActivationEngine(load, **asked)


@pytest.mark.requirement("P-3", "C-9")
def test_what_this_model_does_not_have_frees_it_again(low):
    closed = []
    low.close = lambda: closed.append(True)
    with pytest.raises(NotOfferedError, match=r"block 2 .* is 'mamba'"):
        opened(low, sites="L2_attn_out")
    with pytest.raises(InvalidInputError, match="4 blocks"):
        opened(low, layers=4)
    assert closed == [True, True]


@pytest.mark.requirement("P-3")
def test_active_sites_change_between_calls_and_are_checked_at_once(engine):
    engine.set_active_sites(["L0_resid_post", WIDE], "first")
    found = engine.extract(["abc"])
    assert (found.sites, found.position) == (("L0_resid_post", WIDE), "first")
    for sites, position in (
        ("L9_resid_post", None),
        ("L0_resid_post", "all_generated"),
        ([], None),
    ):
        with pytest.raises(InvalidInputError):
            engine.set_active_sites(sites, position)
    assert [str(site) for site in engine.sites] == ["L0_resid_post", WIDE]
    engine.set_active_sites("embed")
    assert engine.position == "first"
    found = engine.extract(["abc"], position="all_prompt")
    assert (found.sites, found.features.shape) == (("embed",), (3, HIDDEN_SIZE))


@pytest.mark.requirement("P-3")
@pytest.mark.parametrize("sequences", [1, 2, 100, "auto"])
def test_results_do_not_depend_on_sequences_per_call(engine, low, sequences):
    prompts = [f"prompt {n}" for n in range(7)]
    engine.set_sequences_per_call(sequences)
    found = engine.extract(prompts, position="all_prompt")
    np.testing.assert_array_equal(found.features, expected(prompts, found.sites, "all_prompt"))
    assert low.tasks == {1: 7, 2: 4, 100: 1, "auto": 1}[sequences]


@pytest.mark.requirement("P-3")
@pytest.mark.parametrize("sequences", [0, -1, True, 1.5, "many"])
def test_sequences_per_call_are_checked_at_once(engine, sequences):
    with pytest.raises(InvalidInputError, match="a number from 1, 'auto' or an AutoBatch"):
        engine.set_sequences_per_call(sequences)


@pytest.mark.requirement("P-3", "C-15")
def test_a_measured_plan_is_used_from_then_on(engine):
    assert isinstance(engine.measure_batches(budget_bytes=10**6), AutoBatch)
    assert engine.extract(PROMPTS).features.shape == (3, HIDDEN_SIZE)


@pytest.mark.requirement("P-3")
def test_extract_works_where_an_event_loop_is_running(engine):
    async def as_in_a_notebook():
        return engine.extract(PROMPTS)

    assert len(asyncio.run(as_in_a_notebook())) == 3


@pytest.mark.requirement("P-3")
async def test_the_async_twin_gives_the_same_and_runs_beside_others(engine, low):
    low.delay_s = 0.05
    one, other = await asyncio.gather(
        engine.extract_async(PROMPTS), engine.extract_async(PROMPTS, "embed")
    )
    np.testing.assert_array_equal(one.features, expected(PROMPTS, one.sites))
    np.testing.assert_array_equal(other.features, expected(PROMPTS, ["embed"]))


@pytest.mark.requirement("P-3", "R-7")
async def test_cancelling_gives_up_all_calls_in_flight(engine, low):
    low.delay_s = 30
    engine.set_sequences_per_call(1)
    task = asyncio.create_task(engine.extract_async([f"prompt {n}" for n in range(5)]))
    await asyncio.to_thread(wait_until, lambda: low.running == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (low.running, low.cancelled) == (0, 2)


@pytest.mark.requirement("P-3")
async def test_a_call_that_fails_ends_the_others_and_its_error_is_told(engine, low):
    engine.set_sequences_per_call(1)

    async def dies(task):
        if task.rows[0].index == 0:
            raise CaptureError("the engine died", code="engine_dead")
        low.running += 1
        try:
            await asyncio.sleep(30)
        finally:
            low.running -= 1

    low.capture_async = dies
    with pytest.raises(CaptureError, match="the engine died"):
        await engine.extract_async(["a", "b"])
    assert low.running == 0


@pytest.mark.requirement("P-3")
def test_closing_ends_what_runs_and_a_closed_engine_says_so(low, tmp_path):
    low.delay_s = 30
    engine = opened(low)
    ended = []

    def work():
        try:
            engine.extract(PROMPTS)
        except CaptureError as error:
            ended.append(error.code)

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: low.running)
    engine.close()
    thread.join(timeout=5)
    assert (ended, low.running) == (["engine_dead"], 0)
    engine.close()
    with pytest.raises(CaptureError, match="the engine is closed"):
        engine.extract(PROMPTS)
    with pytest.raises(CaptureError, match="the engine is closed"):
        next(engine.stream_to_disk(PROMPTS, tmp_path))


@pytest.mark.requirement("P-3")
def test_rows_that_come_back_neither_good_nor_failed_are_an_error(engine, low):
    whole = low.capture_async

    async def loses_a_row(task):
        chunk = await whole(task)
        chunk.lengths[0] = 0
        return replace(chunk, features=chunk.features[1:])

    low.capture_async = loses_a_row
    with pytest.raises(CaptureError, match="row 0 came back with 0 feature rows and failure None"):
        engine.extract(PROMPTS)


@pytest.mark.requirement("P-3")
def test_features_of_another_shape_than_the_rows_need_are_an_error(engine, low):
    whole = low.capture_async

    async def adds_a_row(task):
        chunk = await whole(task)
        return replace(chunk, features=np.concatenate([chunk.features, chunk.features[:1]]))

    low.capture_async = adds_a_row
    with pytest.raises(CaptureError, match=r"shape \(3, 8\), found \(4, 8\)"):
        engine.extract(PROMPTS)


@pytest.mark.requirement("C-17")
@pytest.mark.parametrize(
    ("option", "code", "instead"),
    [
        ("output_attentions", "feature_not_offered", "attn_out"),
        ("interventions", "feature_not_offered", "hook"),
        ("lora_request", "feature_not_offered", "merge"),
        ("speculative_config", "feature_not_offered", "leave"),
        ("tensor_parallel_size", "parallelism_not_offered", "replicas"),
    ],
)
def test_what_is_not_offered_is_answered_with_what_to_do_instead(
    engine, low, option, code, instead
):
    with pytest.raises(NotOfferedError, match=instead) as refused:
        engine.extract(PROMPTS, **{option: 2})
    assert refused.value.code == code
    with pytest.raises(NotOfferedError, match=instead):
        refuse({option: 2}, ["dtype"])
    assert low.tasks == 0


@pytest.mark.requirement("C-17")
def test_a_misspelt_option_is_named_with_the_one_that_may_be_meant():
    with pytest.raises(InvalidInputError, match="did you mean 'max_model_len'"):
        refuse({"max_model_length": 5}, ["dtype", "max_model_len"])
    refuse({"dtype": "auto"}, ["dtype"])


@pytest.mark.requirement("S-2")
def test_importing_the_interface_imports_nothing_that_runs_models():
    code = (
        "import sys, wllm_ray.engines.base, wllm_ray.engines as e\n"
        "heavy = {'torch', 'transformers', 'vllm', 'ray'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_letting_go_of_an_engine_that_is_closed_leaves_no_thread(low):
    before = threading.active_count()
    with opened(low) as engine:
        engine.extract(PROMPTS)
    del engine
    gc.collect()
    assert threading.active_count() == before

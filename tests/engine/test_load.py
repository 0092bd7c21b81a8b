"""Rows stay right whatever runs beside them, and bad ones fail alone."""

import asyncio
import time

import numpy as np
import pytest
from conftest import idle, prompts_of, relative_l2, stacked, task_of
from tiny_models import MAX_LEN, VOCAB

from wllm_ray.capture import hooks
from wllm_ray.capture.hooks import SiteHooks
from wllm_ray.capture.protocol import Engine
from wllm_ray.capture.reading import take
from wllm_ray.capture.staging import HostStager
from wllm_ray.errors import CaptureError, InvalidInputError, NotOfferedError
from wllm_ray.records import CaptureTask, TokenRow
from wllm_ray.sites import HookSite

TIGHT = 1e-4


def features_alone(engine, prompts, layers):
    return np.concatenate([engine.capture(task_of([p], layers)).features for p in prompts])


@pytest.mark.requirement("P-3")
def test_it_is_an_engine(engine):
    assert isinstance(engine, Engine)


@pytest.mark.requirement("C-2")
async def test_chunks_with_other_layers_share_passes(engine, reference):
    prompts = prompts_of([3, 70, 12, 130, 1, 9, 40, 64, 65, 5], seed=7)
    layer_sets = [(0,), (3, 1), (2, 0, 3), (1,)]
    chunks = await asyncio.gather(
        *(engine.capture_async(task_of(prompts, layers)) for layers in layer_sets)
    )
    expected = reference("qwen3").all_rows(prompts)
    for layers, chunk in zip(layer_sets, chunks, strict=True):
        assert stacked(chunk).shape[1] == len(layers)
        assert relative_l2(stacked(chunk), expected[:, list(layers)]).max() <= TIGHT
    assert idle(engine)


@pytest.mark.requirement("P-3")
def test_a_second_engine_in_the_process_is_refused_and_leaves_the_first_as_it_was(
    engine, open_engine
):
    before = engine.capture(task_of(prompts_of([9]))).features
    with pytest.raises(CaptureError, match="another vLLM engine is open in this process"):
        open_engine("gpt2", selftest=False)
    np.testing.assert_array_equal(engine.capture(task_of(prompts_of([9]))).features, before)


@pytest.mark.requirement("C-2", "C-3")
def test_the_same_prompt_many_times_and_more_rows_than_slots(engine):
    (prompt,) = prompts_of([20])
    chunk = engine.capture(task_of([prompt] * 40, (2,)))
    assert chunk.failures == {}
    assert (chunk.features == chunk.features[0]).all()


@pytest.mark.requirement("C-3", "C-16")
def test_bad_rows_fail_alone(engine):
    good = prompts_of([5, 6, 7], seed=8)
    prompts = [
        np.array([], dtype=np.int32),
        good[0],
        np.full(MAX_LEN + 1, 5, dtype=np.int32),
        np.array([5, VOCAB], dtype=np.int32),
        good[1],
        np.array([5, -1, 6], dtype=np.int32),
        good[2],
    ]
    chunk = engine.capture(task_of(prompts, (0, 3), first_index=100))
    assert {index: f.code for index, f in chunk.failures.items()} == {
        100: "zero_tokens",
        102: "too_long",
        103: "token_out_of_vocabulary",
        105: "token_out_of_vocabulary",
    }
    assert all(failure.permanent for failure in chunk.failures.values())
    assert f"token id {VOCAB} at position 1" in chunk.failures[103].message
    assert chunk.row_index.tolist() == list(range(100, 107))
    assert chunk.lengths.tolist() == [0, 1, 0, 0, 1, 0, 1]
    assert np.array_equal(chunk.features, features_alone(engine, good, (0, 3)))


@pytest.mark.requirement("C-3")
def test_a_task_without_runnable_rows(engine):
    chunk = engine.capture(task_of([np.array([], dtype=np.int32)], (0, 1)))
    assert chunk.features.shape == (0, 2 * engine.description.hidden_size)
    assert engine.capture(task_of([], (0,))).features.shape[0] == 0


@pytest.mark.requirement("C-17")
@pytest.mark.parametrize(
    ("sites", "position", "kind", "code"),
    [
        ((HookSite(0, "mamba_out"),), "last_prompt", NotOfferedError, "site_not_offered"),
        ((HookSite(1, "moe_out"),), "last_prompt", NotOfferedError, "site_not_offered"),
        ((HookSite(0, "resid_post"),), "all_generated", NotOfferedError, "position_not_offered"),
        ((HookSite(0, "resid_post"),), "somewhere", InvalidInputError, "invalid_position"),
        ((HookSite(0, "resid_post"),), "index:1,1", InvalidInputError, "invalid_position"),
        ((HookSite(4, "resid_post"),), "last_prompt", InvalidInputError, "layer_out_of_range"),
        ((HookSite(1, "resid_post"),) * 2, "last_prompt", InvalidInputError, "invalid_site"),
        ((), "last_prompt", InvalidInputError, "invalid_site"),
    ],
)
def test_what_is_not_offered_is_refused_before_it_runs(engine, sites, position, kind, code):
    rows = (TokenRow(0, np.array([5, 6], dtype=np.int32)),)
    with pytest.raises(kind) as error:
        engine.capture(CaptureTask(sites=sites, position=position, rows=rows))
    assert error.value.code == code


@pytest.mark.requirement("C-3")
def test_row_indices_must_ascend(engine):
    row = TokenRow(3, np.array([5, 6], dtype=np.int32))
    task = CaptureTask(sites=(HookSite(0, "resid_post"),), position="last_prompt", rows=(row, row))
    with pytest.raises(InvalidInputError, match="row indices must ascend"):
        engine.capture(task)


@pytest.mark.requirement("R-7")
async def test_a_cancelled_chunk_frees_everything_and_the_engine_goes_on(engine):
    before = engine.capture(task_of(prompts_of([30]), (1,))).features
    running = asyncio.create_task(engine.capture_async(task_of(prompts_of([300] * 60), (0,))))
    beside = asyncio.create_task(engine.capture_async(task_of(prompts_of([30]), (1,))))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert np.array_equal((await beside).features, before)
    assert await asyncio.to_thread(idle, engine)
    engine.check()


@pytest.mark.requirement("C-3")
async def test_a_hook_that_raises_fails_its_rows_only(engine, monkeypatch):
    take_part = SiteHooks._take_part

    def faulty(self, site, *given):
        if site == HookSite(2, "resid_post"):
            raise ValueError("planted")
        take_part(self, site, *given)

    monkeypatch.setattr(SiteHooks, "_take_part", faulty)
    prompts = prompts_of([10, 20])
    bad, good = await asyncio.gather(
        engine.capture_async(task_of(prompts, (2, 3))),
        engine.capture_async(task_of(prompts, (1, 3))),
    )
    assert {f.code for f in bad.failures.values()} == {"hook_failed"}
    assert (
        bad.failures[0].message == "the hook of L2_resid_post raised ValueError; the log has more"
    )
    assert not bad.failures[0].permanent
    assert bad.features.shape[0] == 0
    assert good.failures == {}
    monkeypatch.undo()
    assert engine.capture(task_of(prompts, (2,))).failures == {}


@pytest.mark.requirement("C-3")
def test_a_pass_that_cannot_be_read_fails_its_rows_and_never_the_engine(engine, monkeypatch):
    monkeypatch.setattr(engine._loop.driver.capture, "begin", lambda _: 1 / 0)
    chunk = engine.capture(task_of(prompts_of([10, 100]), (0,)))
    assert {f.code for f in chunk.failures.values()} == {"hook_failed"}
    assert "ZeroDivisionError" in chunk.failures[0].message
    monkeypatch.undo()
    assert engine.capture(task_of(prompts_of([10, 100]), (0,))).failures == {}


@pytest.mark.requirement("C-3")
def test_other_token_ids_in_the_engine_are_noticed(engine, monkeypatch):
    driver = engine._loop.driver
    add = type(driver).add

    def other(self, request_id, token_ids, **options):
        add(self, request_id, [(i + 1) % VOCAB for i in token_ids], **options)

    monkeypatch.setattr(type(driver), "add", other)
    chunk = engine.capture(task_of(prompts_of([10]), (0,)))
    assert chunk.failures[0].code == "token_mismatch"
    assert "position 0" in chunk.failures[0].message


@pytest.mark.requirement("C-3", "C-10")
def test_values_that_cannot_be_right_fail_the_row(engine, monkeypatch):
    stage = HostStager.stage

    def spoilt(self, site, rows):
        rows = rows.clone()
        rows[0, 5] = float("nan")
        rows[1] = 0
        return stage(self, site, rows)

    monkeypatch.setattr(HostStager, "stage", spoilt)
    chunk = engine.capture(task_of(prompts_of([4, 5, 6]), (3,)))
    assert {i: f.code for i, f in chunk.failures.items()} == {0: "non_finite", 1: "all_zero"}
    assert "position 3 of L3_resid_post is not finite, first at hidden index 5" in (
        chunk.failures[0].message
    )
    assert chunk.features.shape[0] == 1


@pytest.mark.requirement("H-5", "R-5")
def test_check_is_quick_while_the_engine_works(engine):
    job, _ = engine._submit(task_of(prompts_of([300] * 20), (0,)))
    slowest = 0.0
    while not job.done.done():
        started = time.perf_counter()
        engine.check()
        slowest = max(slowest, time.perf_counter() - started)
        time.sleep(0.005)
    assert slowest < 0.05
    assert job.done.exception() is None


@pytest.mark.requirement("C-7")
def test_the_prefix_cache_is_off_where_it_is_not_asked_for(engine):
    assert engine.description.fingerprint.reproducibility == "bitwise"
    assert not engine._loop.driver._core.vllm_config.cache_config.enable_prefix_caching
    (prompt,) = prompts_of([100], seed=47)
    first, again = (engine.capture(task_of([prompt], (3,))) for _ in range(2))
    assert np.array_equal(first.features, again.features)


@pytest.mark.requirement("C-3", "C-10")
def test_a_bad_value_in_the_middle_of_a_ragged_row_fails_that_row_alone(engine, monkeypatch):
    prompts = prompts_of([7, 30, 9], seed=48)
    wanted = {"sites": ["L1_attn_out_prelinear", "L2_resid_post"], "position": "all_prompt"}
    right = engine.capture(task_of(prompts, **wanted)).features
    stage = HostStager.stage

    def spoilt(self, site, rows):
        rows = rows.clone()
        if site == HookSite(2, "resid_post"):
            rows[7 + 19, 5] = float("inf")
        return stage(self, site, rows)

    monkeypatch.setattr(HostStager, "stage", spoilt)
    chunk = engine.capture(task_of(prompts, first_index=40, **wanted))
    assert {index: one.code for index, one in chunk.failures.items()} == {41: "non_finite"}
    assert "position 19 of L2_resid_post is not finite, first at hidden index 5" in (
        chunk.failures[41].message
    )
    assert chunk.lengths.tolist() == [7, 0, 9]
    assert np.array_equal(chunk.features, np.delete(right, range(7, 37), axis=0))


@pytest.mark.requirement("C-3")
def test_a_site_of_zeros_is_not_taken_for_an_activation(engine, monkeypatch):
    """What a hybrid's state looks like when its pages are laid out wrongly."""
    monkeypatch.setattr(hooks, "take", lambda *given: take(*given) * 0)
    chunk = engine.capture(task_of(prompts_of([6, 7]), sites=["L1_attn_out"], position="first"))
    assert {one.code for one in chunk.failures.values()} == {"all_zero"}
    assert chunk.failures[0].message == "position 0 of L1_attn_out is zero throughout"
    assert all(one.permanent for one in chunk.failures.values())

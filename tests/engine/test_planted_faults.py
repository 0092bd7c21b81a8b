"""Each fault that the self-test exists for, planted: none of them lets an engine serve."""

import dataclasses

import numpy as np
import pytest
from conftest import prompts_of, relative_l2, stacked, task_of
from tiny_models import LAYERS

from wllm_ray.capture import topology, vllm_config, vllm_worker
from wllm_ray.capture.anatomy import Anatomy
from wllm_ray.capture.hooks import SiteHooks
from wllm_ray.capture.reading import Part, Place, Side
from wllm_ray.capture.router import Route, RoutedPass, Router
from wllm_ray.capture.vllm_driver import VLLMDriver
from wllm_ray.errors import CaptureError
from wllm_ray.offered import offered_sites
from wllm_ray.sites import HookSite

pytestmark = pytest.mark.requirement("C-11", "C-5")


def plant_readings(monkeypatch, change):
    """Let ``change`` have its way with the sites that were found."""
    dissect = vllm_worker.dissect

    def wrong(log, found):
        anatomy = dissect(log, found)
        return Anatomy(change(dict(anatomy.readings)), anatomy.block_types, anatomy.unexplained)

    monkeypatch.setattr(vllm_worker, "dissect", wrong)


def plant_residual(residual):
    def plant(monkeypatch):
        monkeypatch.setattr(topology, "_choose", lambda *_: residual)

    return plant


def plant_all_layers_off_by_one(monkeypatch):
    def shift(readings):
        last = HookSite(0, "resid_post")
        shifted = {}
        for site, reading in readings.items():
            if site.kind == "resid_post":
                shifted[site], last = readings[last], site
            else:
                shifted[site] = reading
        return shifted

    plant_readings(monkeypatch, shift)


def plant_rotated_rows(monkeypatch):
    route = Router.route

    def rotated(self, one_pass):
        routed = route(self, one_pass)
        routes = routed.routes
        rows = [one.rows for one in routes[1:] + routes[:1]]
        moved = tuple(
            Route(one.request_id, np.resize(other, len(one.rows)), one.slots)
            for one, other in zip(routes, rows, strict=True)
        )
        return RoutedPass(moved, routed.mismatched, routed.recaptured)

    monkeypatch.setattr(Router, "route", rotated)


def plant_silent_hook(monkeypatch):
    take = SiteHooks._take

    def silent(self, place, value):
        if not place.name.endswith("layers.1"):
            take(self, place, value)

    monkeypatch.setattr(SiteHooks, "_take", silent)


def plant_hook_twice(monkeypatch):
    take = SiteHooks._take

    def twice(self, place, value):
        take(self, place, value)
        take(self, place, value)

    monkeypatch.setattr(SiteHooks, "_take", twice)


def plant_other_token_ids(monkeypatch):
    add = VLLMDriver.add

    def other(self, request_id, token_ids, **options):
        add(self, request_id, [token + 1 for token in token_ids], **options)

    monkeypatch.setattr(VLLMDriver, "add", other)


@pytest.mark.parametrize(
    ("family", "plant", "message"),
    [
        pytest.param(
            "qwen3",
            plant_residual(topology.Residual.FIRST),
            "log-probabilities|does not receive",
            id="the branch taken for the stream",
        ),
        pytest.param(
            "stablelm",
            plant_residual(topology.Residual.SUM),
            "log-probabilities|does not receive",
            id="a stale residual added",
        ),
        ("qwen3", plant_all_layers_off_by_one, "log-probabilities|is not what"),
        ("qwen3", plant_rotated_rows, "rows are attributed wrongly|is not what"),
        ("qwen3", plant_silent_hook, "fired never, or not everywhere in one pass"),
        ("qwen3", plant_hook_twice, "fired more than once in one pass"),
        ("qwen3", plant_other_token_ids, "was submitted, the engine ran"),
    ],
)
def test_no_engine_starts(family, plant, message, open_engine, monkeypatch):
    plant(monkeypatch)
    with pytest.raises(CaptureError, match=message) as error:
        open_engine(family)
    assert error.value.code in ("self_test_failed", "unknown_structure")


@pytest.mark.slow
@pytest.mark.requirement("C-1")
def test_compiled_graphs_are_no_known_structure(open_engine, monkeypatch):
    """What vllm_args may not ask for: graphs run the blocks' code, and no hook fires."""
    args = vllm_config._engine_args

    def compiled(options, *, on_cpu):
        return args(options, on_cpu=on_cpu) | {"enforce_eager": False}

    monkeypatch.setattr(vllm_config, "_engine_args", compiled)
    with pytest.raises(CaptureError, match=r"each run once.* model\.layers: \[\]") as error:
        open_engine("qwen3")
    assert error.value.code == "unknown_structure"


@pytest.mark.requirement("C-1")
def test_blocks_whose_hooks_do_not_fire_are_no_known_structure(open_engine, monkeypatch):
    """The same without compiling anything."""
    from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer

    def without_hooks(self, *args, **kwargs):
        return self.forward(*args, **kwargs)

    monkeypatch.setattr(Qwen3DecoderLayer, "__call__", without_hooks)
    with pytest.raises(CaptureError, match="each run once") as error:
        open_engine("qwen3")
    assert error.value.code == "unknown_structure"


def one_block_early(readings):
    """The same mistake on both sides of a border between blocks, so that they agree."""
    wrong = readings[HookSite(1, "resid_post")]
    return readings | {HookSite(2, "resid_post"): wrong, HookSite(3, "resid_pre"): wrong}


def two_blocks_changed_over(readings):
    stream = [readings[HookSite(layer, "resid_post")] for layer in (1, 2)]
    for layer, reading in zip((2, 1), stream, strict=True):
        readings |= {
            HookSite(layer, "resid_post"): reading,
            HookSite(layer + 1, "resid_pre"): reading,
        }
    return readings


@pytest.mark.parametrize(
    ("change", "wrong"), [(one_block_early, [2]), (two_blocks_changed_over, [1, 2])]
)
def test_the_stream_in_the_middle_read_at_another_block_is_not_offered(
    change, wrong, open_engine, reference, monkeypatch
):
    """Neither the logits nor the next block would tell; what the block adds up to does."""
    plant_readings(monkeypatch, change)
    with open_engine("qwen3") as engine:
        offered = set(offered_sites(engine.description))
        right = [layer for layer in range(LAYERS) if layer not in wrong]
        chunk = engine.capture(task_of(prompts_of([9, 20]), right))
    for layer in range(LAYERS):
        assert (HookSite(layer, "resid_post") in offered) == (layer in right)
    assert all(HookSite(layer + 1, "resid_pre") not in offered for layer in wrong)
    expected = reference("qwen3").all_rows(prompts_of([9, 20]))[:, right]
    assert relative_l2(stacked(chunk), expected).max() <= 1e-4


def before_the_norm(readings):
    """What gemma's attention returned, and not what the norm behind it made of it."""
    site = HookSite(1, "attn_out")
    reading = readings[site]
    block = readings[HookSite(1, "resid_post")].parts[0].place.module
    place = Place(block.self_attn, "layers.1.self_attn", Side.OUTPUT)
    return readings | {site: dataclasses.replace(reading, parts=(Part(place, ()),))}


def without_the_multiplier(readings):
    site = HookSite(1, "attn_out")
    assert readings[site].scale not in (None, 1.0)
    return readings | {site: dataclasses.replace(readings[site], scale=None)}


@pytest.mark.parametrize(
    ("family", "change"), [("gemma3", before_the_norm), ("granite", without_the_multiplier)]
)
def test_a_branch_that_is_not_what_is_added_is_not_offered(
    family, change, open_engine, reference, monkeypatch
):
    plant_readings(monkeypatch, change)
    with open_engine(family) as engine:
        told = engine.description
        chunk = engine.capture(task_of(prompts_of([9, 20])))
    offered = offered_sites(told)
    assert HookSite(1, "attn_out") not in offered
    assert HookSite(1, "attn_out_prelinear") not in offered
    assert {HookSite(0, "attn_out"), HookSite(2, "attn_out"), HookSite(1, "mlp_out")} < set(offered)
    assert (
        "L1_resid_pre + L1_attn_out = L1_resid_mid is off by" in told.selftest.checks["identities"]
    )
    expected = reference(family).all_rows(prompts_of([9, 20]))
    assert relative_l2(stacked(chunk), expected).max() <= 1e-4

"""Hook sites: one canonical name for each, whatever was typed."""

from __future__ import annotations

import pytest

from wllm_ray.errors import InvalidInputError
from wllm_ray.sites import BLOCK_KINDS, MODEL_KINDS, HookSite, parse_site, resolve_sites

pytestmark = pytest.mark.requirement("C-9")


@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_block_sites_round_trip(kind):
    site = HookSite(12, kind)
    assert str(site) == f"L12_{kind}"
    assert parse_site(str(site)) == HookSite.parse(str(site)) == site


@pytest.mark.parametrize("kind", MODEL_KINDS)
def test_model_sites_round_trip(kind):
    assert str(HookSite(None, kind)) == kind
    assert parse_site(kind) == HookSite(None, kind)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("L0_block", "L0_resid_post"),
        ("blocks.3.hook_resid_post", "L3_resid_post"),
        ("blocks.3.hook_resid_pre", "L3_resid_pre"),
        ("blocks.3.hook_resid_mid", "L3_resid_mid"),
        ("blocks.0.hook_attn_out", "L0_attn_out"),
        ("blocks.10.hook_mlp_out", "L10_mlp_out"),
    ],
)
def test_aliases(text, canonical):
    assert str(parse_site(text)) == canonical


@pytest.mark.parametrize(
    "text",
    [
        "", "12", "block", "resid_post", "L12", "L-1_resid_post", "L01_resid_post", "l1_resid_post",
        "L1_resid_post ", "L1_resid_post\n", "L1_embed", "L1_nothing", "blocks.1.hook_embed",
        "blocks.1.hook_mamba_out", "blocks.01.hook_resid_post", "L\u0661_resid_post",
    ],
)  # fmt: skip
def test_what_is_no_site(text):
    with pytest.raises(InvalidInputError) as error:
        parse_site(text)
    assert error.value.code == "invalid_site"


@pytest.mark.parametrize(
    ("layer", "kind", "match"),
    [
        (1, "other", "unknown site kind 'other'; write for example resid_post"),
        (None, "resid_post", "needs a layer, found layer None"),
        (0, "embed", "carries no layer, found layer 0"),
        (-1, "resid_post", "zero-based block indices, found -1"),
    ],
)
def test_a_site_cannot_be_nonsense(layer, kind, match):
    with pytest.raises(InvalidInputError, match=match):
        HookSite(layer, kind)


def resolve(layers=None, site="block", sites=None, num_layers=4):
    return [str(one) for one in resolve_sites(layers, site, sites, num_layers=num_layers)]


@pytest.mark.requirement("H-1")
def test_union_in_the_order_asked():
    assert resolve([3, 0], "block", ["embed", "L1_mlp_out"]) == [
        "L3_resid_post",
        "L0_resid_post",
        "embed",
        "L1_mlp_out",
    ]
    assert resolve([10, 9], "attn_out", num_layers=11) == ["L10_attn_out", "L9_attn_out"]
    assert resolve(sites=["final_norm"]) == ["final_norm"]


@pytest.mark.requirement("H-1")
def test_duplicates_are_refused_across_spellings():
    with pytest.raises(InvalidInputError, match="L1_resid_post is listed twice") as error:
        resolve([1], "block", ["blocks.1.hook_resid_post"])
    assert error.value.code == "invalid_site"


def test_nothing_asked():
    for layers, sites in ((None, None), ([], [])):
        with pytest.raises(InvalidInputError, match="no hook site asked for"):
            resolve(layers, sites=sites)


def test_a_layer_that_the_model_does_not_have():
    with pytest.raises(InvalidInputError, match="the model has 4 blocks, numbered 0 to 3") as error:
        resolve([4])
    assert error.value.code == "layer_out_of_range"
    with pytest.raises(InvalidInputError) as error:
        resolve([-1])
    assert error.value.code == "layer_out_of_range"

"""Which sites are offered, how wide they are, and what is said of the others."""

from dataclasses import dataclass

import pytest
from torch import nn

from wllm_ray.capture.reading import Part, Place, Reading, Side
from wllm_ray.capture.request import support_of
from wllm_ray.errors import InvalidInputError, NotOfferedError
from wllm_ray.offered import offered_kinds, offered_sites, site_widths
from wllm_ray.records import SiteSupport
from wllm_ray.sites import HookSite

pytestmark = pytest.mark.requirement("C-9")


@dataclass(frozen=True)
class Model:
    """Two attention blocks of unlike width around a Mamba block."""

    architecture: str = "ToyForCausalLM"
    layer_types: tuple[str, ...] = ("attention + mlp", "mamba", "attention + mlp")
    sites: tuple[SiteSupport, ...] = (
        SiteSupport(kind="resid_post", layers=(0, 1, 2), width=8),
        SiteSupport(kind="attn_out_prelinear", layers=(2,), width=24),
        SiteSupport(kind="attn_out_prelinear", layers=(0,), width=12),
        SiteSupport(kind="mamba_out", layers=(1,), width=8),
        SiteSupport(kind="final_norm", layers=None, width=8),
    )


def test_widths_come_in_the_order_asked_for():
    names = ("L2_attn_out_prelinear", "final_norm", "L0_attn_out_prelinear", "L1_mamba_out")
    assert site_widths(Model(), map(HookSite.parse, names)) == (24, 8, 12, 8)


def test_every_single_site_is_listed_kind_by_kind():
    assert offered_kinds(Model()) == (
        "resid_post",
        "attn_out_prelinear",
        "mamba_out",
        "final_norm",
    )
    assert [str(site) for site in offered_sites(Model())] == [
        "L0_resid_post",
        "L1_resid_post",
        "L2_resid_post",
        "L0_attn_out_prelinear",
        "L2_attn_out_prelinear",
        "L1_mamba_out",
        "final_norm",
    ]


@pytest.mark.parametrize(
    ("site", "kind", "code", "message"),
    [
        ("L3_resid_post", InvalidInputError, "layer_out_of_range", "has 3 blocks, numbered 0 to 2"),
        ("L3_moe_out", InvalidInputError, "layer_out_of_range", "layer 3 does not exist"),
        ("L0_moe_out", NotOfferedError, "site_not_offered", "not offered on ToyForCausalLM"),
        ("embed", NotOfferedError, "site_not_offered", "offered kinds: resid_post, attn_out_pre"),
        (
            "L1_attn_out_prelinear",
            NotOfferedError,
            "site_not_offered",
            "block 1 of ToyForCausalLM is 'mamba' and offers resid_post, mamba_out; blocks with",
        ),
    ],
)
def test_what_is_not_there_is_named(site, kind, code, message):
    with pytest.raises(kind) as error:
        site_widths(Model(), [HookSite.parse("L0_resid_post"), HookSite.parse(site)])
    assert error.value.code == code
    assert message in error.value.message


def test_what_an_engine_offers_is_what_it_can_read():
    """Kinds that differ in width from block to block are told apart, and none is lost."""
    place = Place(nn.Identity(), "x", Side.OUTPUT)

    def reading(width, layer):
        return Reading((Part(place, ()),), width, layer)

    sites = {
        HookSite(None, "embed"): reading(8, -1),
        HookSite(0, "resid_post"): reading(8, 0),
        HookSite(0, "attn_out_prelinear"): reading(12, 0),
        HookSite(1, "resid_post"): reading(8, 1),
        HookSite(1, "attn_out_prelinear"): reading(24, 1),
    }
    told = support_of(sites)
    assert told == (
        SiteSupport(kind="resid_post", layers=(0, 1), width=8),
        SiteSupport(kind="attn_out_prelinear", layers=(0,), width=12),
        SiteSupport(kind="attn_out_prelinear", layers=(1,), width=24),
        SiteSupport(kind="embed", layers=None, width=8),
    )
    model = Model(sites=told)
    assert set(offered_sites(model)) == set(sites)
    assert site_widths(model, sites) == tuple(one.width for one in sites.values())

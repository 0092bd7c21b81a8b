"""What sites add up to, and which of them are in doubt where they do not."""

import numpy as np
import pytest
import torch

from wllm_ray.capture.identities import check_block, check_stream, refused_sites
from wllm_ray.sites import HookSite

pytestmark = pytest.mark.requirement("C-5", "C-11")

LAYERS, ROWS, HIDDEN = 3, 12, 32
KINDS = (
    "resid_pre",
    "attn_out",
    "attn_out_prelinear",
    "resid_mid",
    "mlp_out",
    "moe_out",
    "resid_post",
)


def model(dtype=torch.float32, kinds=KINDS):
    """Site → [rows, hidden] float32, as a model of such blocks has them."""
    random = torch.Generator().manual_seed(4)
    stream = torch.randn(ROWS, HIDDEN, generator=random).to(dtype)
    found = {HookSite(None, "embed"): stream}
    for layer in range(LAYERS):
        attn, mlp = (torch.randn(ROWS, HIDDEN, generator=random).to(dtype) for _ in range(2))
        middle = stream + attn
        after = middle + mlp
        values = dict(zip(KINDS, (stream, attn, attn, middle, mlp, mlp, after), strict=True))
        found |= {HookSite(layer, kind): values[kind] for kind in kinds}
        stream = after
    return {site: value.float().numpy().copy() for site, value in found.items()}


def findings_of(values, dtype=torch.float32):
    found = []
    for layer in range(LAYERS):
        offered = [site.kind for site in values if site.layer == layer]
        found += check_block(layer, offered, values.__getitem__, dtype)
    return found


def refused_of(values, dtype=torch.float32):
    return {str(site) for site in refused_sites(findings_of(values, dtype), values, LAYERS)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_adds_up_is_offered_whole(dtype):
    values = model(dtype)
    found = findings_of(values, dtype)
    assert [one.text for one in found[:2]] == [
        "L0_resid_pre + L0_attn_out = L0_resid_mid",
        "L0_resid_mid + L0_mlp_out = L0_resid_post",
    ]
    assert all(one.holds and one.off == 0.0 for one in found)
    assert refused_of(values, dtype) == set()


@pytest.mark.requirement("C-10")
def test_sums_of_another_dtype_than_the_models_are_noticed():
    assert not all(one.holds for one in findings_of(model(torch.bfloat16), torch.float32))


@pytest.mark.parametrize(
    ("kind", "refused"),
    [
        ("attn_out", {"L1_attn_out", "L1_attn_out_prelinear", "L1_resid_mid"}),
        ("mlp_out", {"L1_mlp_out", "L1_moe_out", "L1_resid_mid"}),
    ],
)
def test_a_branch_that_does_not_add_up_is_refused_with_what_belongs_to_it(kind, refused):
    values = model()
    values[HookSite(1, kind)] *= np.float32(1.01)
    assert refused_of(values) == refused


def test_a_stream_for_which_nothing_speaks_is_refused():
    """Blocks 0 and 2 do not add up to it either."""
    values = model()
    for site in (HookSite(1, "resid_post"), HookSite(2, "resid_pre")):
        values[site] = values[HookSite(0, "resid_post")]
    refused = refused_of(values)
    assert {"L1_resid_post", "L2_resid_pre"} < refused
    assert not {"L0_resid_post", "L1_resid_pre", "L2_resid_post", "embed"} & refused


def test_a_stream_that_one_side_vouches_for_stays():
    values = model()
    for kind in ("attn_out", "mlp_out"):
        values[HookSite(1, kind)] *= np.float32(1.01)
    assert not {f"L{layer}_resid_post" for layer in range(LAYERS)} & refused_of(values)


def test_a_wrong_beginning_is_refused():
    values = model()
    for site in (HookSite(None, "embed"), HookSite(0, "resid_pre")):
        values[site] = values[site] * 2
    refused = refused_of(values)
    assert {"embed", "L0_resid_pre"} < refused
    assert "L0_resid_post" not in refused


def test_branches_side_by_side_are_one_sum():
    values = model(kinds=tuple(kind for kind in KINDS if kind != "resid_mid"))
    found = findings_of(values)
    assert [one.text for one in found] == [
        f"L{n}_resid_pre + L{n}_attn_out + L{n}_mlp_out = L{n}_resid_post" for n in range(LAYERS)
    ]
    assert all(one.holds for one in found)


def test_blocks_that_offer_their_stream_alone_have_nothing_to_check():
    values = model(kinds=("resid_pre", "resid_post"))
    assert findings_of(values) == []
    assert refused_of(values) == set()


def test_the_stream_is_the_same_to_the_bit_or_it_is_not():
    one = np.ones((2, 3), dtype=np.float32)
    assert check_stream(one, one.copy())
    assert not check_stream(one, np.nextafter(one, 2, dtype=np.float32))

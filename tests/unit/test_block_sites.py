"""What a block's sum leaves in doubt is not offered; what a sibling makes certain is."""

import resource
import time
from functools import partial

import pytest
import torch
from test_anatomy import (
    HIDDEN,
    SEQUENTIAL,
    STREAM,
    TOKENS,
    Attention,
    AttentionOnly,
    MambaMixer,
    Sandwich,
    Scaled,
    Sequential,
    dissected,
    kinds_of,
    read,
)
from torch import nn
from torch.nn import functional

from wllm_ray.sites import HookSite

pytestmark = pytest.mark.requirement("C-5")

# Neighbouring bfloat16 numbers are 128 apart here: what branches of size 1 add is rounded away.
HUGE = 3e4
EXTRA_OUTPUTS = 40
MOST_SECONDS, MOST_KIB = 15.0, 1_500_000
ATTENTION, FORWARD = "self_attn.o_proj", "mlp.down"
ZEROED = [(FORWARD,), (ATTENTION,), (ATTENTION, FORWARD)]


def scaled(make, factor, *projections):
    """A block with the weights and biases of some projections multiplied."""
    block = make()
    with torch.no_grad():
        for name in projections:
            for parameter in block.get_submodule(name).parameters():
                parameter.mul_(factor)
    return block


class Mix(Attention):
    """A mixer whose class does not say so."""


class Unnamed(Sequential):
    """Neither class nor attribute says what mixes its tokens."""

    def __init__(self):
        super().__init__()
        self.mix = Mix()
        del self.self_attn

    def forward(self, stream):
        stream = stream + self.mix(self.input_layernorm(stream))
        return stream + self.mlp(self.post_attention_layernorm(stream))


class WeightedSum(nn.Module):
    """Is given branch and stream, and scales both."""

    def __init__(self):
        super().__init__()
        self.of_branch = nn.Parameter(torch.rand(HIDDEN) + 0.5)
        self.of_stream = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def forward(self, branch, stream):
        return branch * self.of_branch + stream * self.of_stream


class WeightedSums(Sequential):
    def __init__(self):
        super().__init__()
        self.first, self.second = WeightedSum(), WeightedSum()

    def forward(self, stream):
        stream = self.first(self.self_attn(self.input_layernorm(stream)), stream)
        return self.second(self.mlp(self.post_attention_layernorm(stream)), stream)


class RoutedAttention(Attention):
    """No module returns its branch but itself; its router, a leaf, returns its second output."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(HIDDEN, 4)

    def forward(self, stream):
        heads = torch.tanh(self.qkv(stream))
        output = functional.linear(heads, self.o_proj.weight, self.o_proj.bias)
        return output, self.router(stream)


class Routed(Sequential):
    def __init__(self):
        super().__init__(mixer=RoutedAttention)

    def forward(self, stream):
        stream = stream + self.self_attn(self.input_layernorm(stream))[0]
        return stream + self.mlp(self.post_attention_layernorm(stream))


class ManyOutputs(Sequential):
    """Dozens of outputs as wide as the stream and several constants: millions of sums of three."""

    def __init__(self):
        super().__init__()
        self.extra = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(EXTRA_OUTPUTS))

    def mixed(self, stream):
        for number, layer in enumerate(self.extra):
            stream = stream + torch.tanh(layer(stream)) * (0.1 * (1 + number % 4))
        return stream

    def forward(self, stream):
        stream = stream + self.self_attn(self.mixed(self.input_layernorm(stream)))
        return stream + self.mlp(self.post_attention_layernorm(stream))


class ManyOutputsGated(ManyOutputs):
    """The same, and what is added is no module's output."""

    def forward(self, stream):
        mixed = self.mixed(self.input_layernorm(stream))
        stream = stream + self.self_attn(mixed) * mixed.tanh()
        return stream + self.mlp(self.post_attention_layernorm(stream)) * 0.7


class ScaledOtherwise(Scaled):
    multiplier = 0.5


class Gated(Sequential):
    """Adds the feed-forward times a vector: no module's output is what is added."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.rand(HIDDEN))

    def forward(self, stream):
        stream = stream + self.self_attn(self.input_layernorm(stream))
        return stream + self.mlp(self.post_attention_layernorm(stream)) * self.gate


class GatedAlone(nn.Module):
    """One output as wide as the stream, which is not what is added."""

    def __init__(self):
        super().__init__()
        self.self_attn, self.gate = Attention(), nn.Parameter(torch.rand(HIDDEN))

    def forward(self, stream):
        return stream + self.self_attn(stream) * self.gate


class Nudge(nn.Module):
    def forward(self, branch):
        return branch + branch * 2**-22


class Nudged(AttentionOnly):
    """Two outputs that differ by less than the sum shows; the second is added."""

    def __init__(self):
        super().__init__()
        self.nudge = Nudge()

    def forward(self, stream):
        return stream + self.nudge(self.mixer(self.norm(stream)))


def told(anatomy, layer):
    """Kind → how it is read, without the number of the layer."""
    return {
        site.kind: reading.describe().replace(f"layers.{layer}.", "")
        for site, reading in anatomy.readings.items()
        if site.layer == layer and site.kind not in STREAM
    }


@pytest.mark.parametrize("block", [Sequential, Sandwich])
def test_a_block_whose_stream_swallows_its_branches_is_read_as_its_sibling_is(block):
    projections = ("post_attn_norm", "post_mlp_norm") if block is Sandwich else (ATTENTION, FORWARD)
    normal = partial(scaled, block, HUGE, *projections)
    anatomy, model = dissected(block, block, normal, offset=HUGE, dtype=torch.bfloat16)
    assert kinds_of(anatomy, 2) == SEQUENTIAL
    assert told(anatomy, 0) == told(anatomy, 1) == told(anatomy, 2)
    assert anatomy.unexplained == ()

    found = read(anatomy, model, torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16))
    for layer in (0, 1):
        middle = found[f"L{layer}_resid_pre"] + found[f"L{layer}_attn_out"]
        assert torch.equal(middle, found[f"L{layer}_resid_mid"])
        assert torch.equal(middle + found[f"L{layer}_mlp_out"], found[f"L{layer}_resid_post"])


@pytest.mark.parametrize("block", [Sequential, Sandwich])
def test_where_every_stream_swallows_its_branches_nothing_but_it_is_offered(block):
    """Any output explains such a block, a norm's as well."""
    anatomy, _ = dissected(block, block, block, offset=HUGE, dtype=torch.bfloat16)
    assert [kinds_of(anatomy, layer) for layer in range(3)] == [STREAM] * 3
    assert anatomy.unexplained == (0, 1, 2)


def test_a_branch_that_the_sum_does_not_need_is_not_offered():
    """The only one that could have been added, but the stream is the same without it."""
    anatomy, _ = dissected(GatedAlone, GatedAlone, offset=HUGE, dtype=torch.bfloat16)
    assert kinds_of(anatomy, 0) == kinds_of(anatomy, 1) == STREAM


def test_a_branch_with_a_rival_is_not_offered():
    anatomy, _ = dissected(Nudged, Nudged, offset=100.0)
    assert kinds_of(anatomy, 0) == kinds_of(anatomy, 1) == STREAM


def test_a_block_whose_sum_contradicts_its_sibling_does_not_take_its_sites():
    anatomy, _ = dissected(Sequential, Gated, Sequential)
    assert kinds_of(anatomy, 0) == SEQUENTIAL
    assert kinds_of(anatomy, 1) == SEQUENTIAL - {"mlp_out"}


def test_a_mixer_whose_name_says_nothing_is_not_called_a_feed_forward():
    anatomy, _ = dissected(Unnamed, Unnamed)
    assert kinds_of(anatomy, 0) == kinds_of(anatomy, 1) == STREAM


def test_a_module_that_scales_what_it_adds_shows_no_middle():
    anatomy, _ = dissected(WeightedSums, WeightedSums)
    assert kinds_of(anatomy, 0) == kinds_of(anatomy, 1) == STREAM


def test_another_output_of_attention_does_not_pass_for_its_projection():
    anatomy, _ = dissected(Routed, Routed)
    assert kinds_of(anatomy, 0) == kinds_of(anatomy, 1) == SEQUENTIAL - {"attn_out_prelinear"}


@pytest.mark.parametrize("block", [Sequential, Sandwich, Scaled])
@pytest.mark.parametrize("zeroed", ZEROED)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_block_that_adds_zeros_offers_what_its_siblings_offer(block, zeroed, layer):
    if block is Sandwich:
        # A norm of zeros is not a number; what is zero is the norm's weight.
        zeroed = ["post_attn_norm" if name == ATTENTION else "post_mlp_norm" for name in zeroed]
    makers = [block] * 3
    makers[layer] = partial(scaled, block, 0.0, *zeroed)
    anatomy, model = dissected(*makers)
    assert told(anatomy, 0) == told(anatomy, 1) == told(anatomy, 2)
    assert kinds_of(anatomy, layer) == SEQUENTIAL

    torch.manual_seed(6)
    found = read(anatomy, model, torch.randn(TOKENS, HIDDEN))
    for number in range(3):
        attention, forward = found[f"L{number}_attn_out"], found[f"L{number}_mlp_out"]
        of_layer = zeroed if number == layer else ()
        assert bool(attention.any()) is not any("att" in name for name in of_layer)
        assert bool(forward.any()) is not any("mlp" in name for name in of_layer)
        middle = found[f"L{number}_resid_pre"] + attention
        assert torch.equal(middle, found[f"L{number}_resid_mid"])
        assert torch.equal(middle + forward, found[f"L{number}_resid_post"])


@pytest.mark.parametrize("projection", [ATTENTION, FORWARD])
def test_a_block_of_which_one_branch_is_all_but_zero_offers_what_its_siblings_offer(projection):
    tiny = partial(scaled, Sequential, 1e-4, projection)
    anatomy, model = dissected(Sequential, tiny, Sequential, dtype=torch.bfloat16)
    assert told(anatomy, 0) == told(anatomy, 1) == told(anatomy, 2)
    assert kinds_of(anatomy, 1) == SEQUENTIAL

    found = read(anatomy, model, torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16))
    branch = found["L1_attn_out" if projection == ATTENTION else "L1_mlp_out"]
    assert 0 < branch.abs().max() < 1e-2
    with torch.inference_mode():
        projected = model.layers[1].self_attn.o_proj(found["L1_attn_out_prelinear"])
    assert torch.equal(projected, found["L1_attn_out"])
    middle = found["L1_resid_pre"] + found["L1_attn_out"]
    assert torch.equal(middle, found["L1_resid_mid"])
    assert torch.equal(middle + found["L1_mlp_out"], found["L1_resid_post"])


@pytest.mark.parametrize(
    ("block", "kinds"), [(ManyOutputs, SEQUENTIAL), (ManyOutputsGated, STREAM)]
)
def test_many_outputs_are_settled_or_given_up_at_once(block, kinds):
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.monotonic()
    anatomy, _ = dissected(block)
    assert time.monotonic() - began < MOST_SECONDS
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < MOST_KIB
    assert kinds_of(anatomy, 0) == kinds


@pytest.mark.parametrize("zeroed", [("self_attn.out",), ("self_attn.out", FORWARD)])
def test_a_block_does_not_take_the_sites_of_a_sibling_of_another_class(zeroed):
    other = partial(scaled, lambda: Sequential(mixer=MambaMixer), 0.0, *zeroed)
    anatomy, _ = dissected(Sequential, other, Sequential)
    assert kinds_of(anatomy, 0) == SEQUENTIAL
    assert kinds_of(anatomy, 1) == STREAM | ({"mlp_out"} if FORWARD not in zeroed else set())


@pytest.mark.parametrize("normal", [Sequential, ScaledOtherwise])
def test_a_block_does_not_take_the_sites_of_a_sibling_that_scales_otherwise(normal):
    """Its branches are lost in rounding, so that its sum holds with any constant."""
    sibling = partial(scaled, normal, HUGE, ATTENTION, FORWARD)
    anatomy, _ = dissected(Scaled, sibling, offset=HUGE, dtype=torch.bfloat16)
    assert HookSite(1, "attn_out") in anatomy.readings
    assert kinds_of(anatomy, 0) == STREAM

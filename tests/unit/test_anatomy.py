"""What each block adds is found by arithmetic, on blocks of every structure and of none."""

import pytest
import torch
from torch import nn

from wllm_ray.capture.anatomy import dissect
from wllm_ray.capture.block_lists import find_block_lists
from wllm_ray.capture.probe import Probe
from wllm_ray.capture.reading import Side, take
from wllm_ray.capture.topology import settle
from wllm_ray.sites import HookSite

pytestmark = pytest.mark.requirement("C-5", "C-9")

TOKENS, HIDDEN, LAYERS = 11, 16, 2
STREAM = {"resid_pre", "resid_post"}
SEQUENTIAL = STREAM | {"attn_out", "attn_out_prelinear", "resid_mid", "mlp_out"}


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def forward(self, stream):
        return stream / stream.pow(2).mean(-1, keepdim=True).sqrt() * self.weight


class Attention(nn.Module):
    """Its heads are wider than the stream; ``tail`` is what it returns beside its output."""

    def __init__(self, tail=()):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 24)
        self.o_proj = nn.Linear(24, HIDDEN)
        self.tail = tail

    def forward(self, stream):
        output = self.o_proj(torch.tanh(self.qkv(stream)))
        return (output, *self.tail) if self.tail else output


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 32), nn.Linear(32, HIDDEN)

    def forward(self, stream):
        return self.down(torch.relu(self.up(stream)))


class SparseMoeBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(MLP() for _ in range(2))

    def forward(self, stream):
        return self.experts[0](stream) + self.experts[1](stream)


class MambaMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, stream):
        return self.out(torch.sin(stream))


class Sequential(nn.Module):
    """Attention, then feed-forward."""

    def __init__(self, mixer=Attention, feed_forward=MLP):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(), RMSNorm()
        self.self_attn, self.mlp = mixer(), feed_forward()

    def forward(self, stream):
        stream = stream + self.self_attn(self.input_layernorm(stream))
        return stream + self.mlp(self.post_attention_layernorm(stream))


class Sandwich(Sequential):
    """A norm behind each branch."""

    def __init__(self):
        super().__init__()
        self.post_attn_norm, self.post_mlp_norm = RMSNorm(), RMSNorm()

    def forward(self, stream):
        stream = stream + self.post_attn_norm(self.self_attn(self.input_layernorm(stream)))
        return stream + self.post_mlp_norm(self.mlp(self.post_attention_layernorm(stream)))


class Scaled(Sequential):
    """Each branch times a constant of the block."""

    multiplier = 0.22

    def forward(self, stream):
        stream = stream + self.self_attn(self.input_layernorm(stream)) * self.multiplier
        return stream + self.mlp(self.post_attention_layernorm(stream)) * self.multiplier


class Biased(Sequential):
    """Attention hands its output bias on, to be added by the block."""

    def __init__(self):
        super().__init__(lambda: Attention(tail=(torch.randn(HIDDEN),)))

    def forward(self, stream):
        output, bias = self.self_attn(self.input_layernorm(stream))
        stream = stream + (output + bias)
        return stream + self.mlp(self.post_attention_layernorm(stream))


class Parallel(Sequential):
    """Both branches read the stream as it came."""

    def forward(self, stream):
        normed = self.input_layernorm(stream)
        return stream + self.self_attn(normed) + self.mlp(normed)


class ScaledAtTheEnd(Sequential):
    """Nothing is what the feed-forward added: the block multiplies its whole sum."""

    def forward(self, stream):
        return super().forward(stream) * 0.7


class AttentionOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.mixer = RMSNorm(), Attention()

    def forward(self, stream):
        return stream + self.mixer(self.norm(stream))


class Hidden(nn.Module):
    """Its branch is the output of no module."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(HIDDEN, 7)
        self.weight = nn.Parameter(torch.randn(7, HIDDEN))

    def forward(self, stream):
        return stream + self.inner(stream) @ self.weight


class Model(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.layers, self.norm = nn.ModuleList(blocks), RMSNorm()

    def forward(self, stream):
        for block in self.layers:
            stream = block(stream)
        return self.norm(stream)


def dissected(*makers, offset=0.0, dtype=torch.float32):
    """The anatomy of a model of such blocks, and the model; ``offset`` is added to its stream."""
    torch.manual_seed(5)
    model = Model(*(make() for make in makers)).to(dtype)
    lists = find_block_lists(model, len(makers))
    with torch.inference_mode(), Probe(model, lists, HIDDEN, TOKENS) as probe:
        model((torch.randn(TOKENS, HIDDEN) + offset).to(dtype))
    with torch.inference_mode():
        topology = settle(probe.log, lists, dict(model.named_modules()))
        return dissect(probe.log, topology), model


def kinds_of(anatomy, layer=1):
    return {site.kind for site in anatomy.readings if site.layer == layer}


def read(anatomy, model, rows):
    """Site → what its reading gives in a fresh pass, hooked here by hand."""
    taken = {}
    for site, reading in anatomy.readings.items():
        for number, part in enumerate(reading.parts):

            def keep(value, key=(site, number), part=part):
                taken[key] = take(value, part.path, torch.arange(TOKENS))

            if part.place.side is Side.OUTPUT:
                part.place.module.register_forward_hook(lambda _, __, out, keep=keep: keep(out))
            else:
                part.place.module.register_forward_pre_hook(
                    lambda _, args, kwargs, keep=keep: keep((args, kwargs)), with_kwargs=True
                )
    with torch.inference_mode():
        model(rows)
    return {
        str(site): reading.combine([taken[site, n] for n in range(len(reading.parts))])
        for site, reading in anatomy.readings.items()
    }


@pytest.mark.parametrize(
    ("block", "kinds"),
    [
        (Sequential, SEQUENTIAL),
        (Sandwich, SEQUENTIAL),
        (Scaled, SEQUENTIAL),
        (Biased, SEQUENTIAL),
        (Parallel, SEQUENTIAL - {"resid_mid"}),
        (ScaledAtTheEnd, SEQUENTIAL - {"mlp_out"}),
        (lambda: Sequential(feed_forward=SparseMoeBlock), SEQUENTIAL | {"moe_out"}),
        (
            lambda: Sequential(mixer=MambaMixer),
            STREAM | {"mamba_out", "mixer_out", "resid_mid", "mlp_out"},
        ),
        (AttentionOnly, STREAM | {"attn_out", "attn_out_prelinear"}),
        (Hidden, STREAM),
    ],
)
def test_the_sites_of_each_structure(block, kinds):
    anatomy, _ = dissected(block, block)
    assert kinds_of(anatomy, 0) == kinds_of(anatomy, 1) == kinds
    assert anatomy.unexplained == ((0, 1) if kinds == STREAM else ())
    assert {HookSite(None, "embed"), HookSite(None, "final_norm")} < set(anatomy.readings)


@pytest.mark.parametrize(
    "block", [Sequential, Sandwich, Scaled, Biased, Parallel, ScaledAtTheEnd, AttentionOnly]
)
def test_what_is_read_adds_up_in_another_pass(block):
    """Of other numbers, so that what was equal by chance would show."""
    anatomy, model = dissected(block, block)
    torch.manual_seed(6)
    found = read(anatomy, model, torch.randn(TOKENS, HIDDEN))
    before, after = found["L1_resid_pre"], found["L1_resid_post"]
    assert torch.equal(before, found["L0_resid_post"])
    assert torch.equal(found["embed"], found["L0_resid_pre"])
    if "L1_resid_mid" in found:
        assert torch.equal(before + found["L1_attn_out"], found["L1_resid_mid"])
        before = found["L1_resid_mid"]
    else:
        before = before + found["L1_attn_out"]
    if block is not ScaledAtTheEnd:
        assert torch.equal(before + found.get("L1_mlp_out", torch.zeros(())), after)
    attention = model.layers[1].get_submodule("mixer" if block is AttentionOnly else "self_attn")
    with torch.inference_mode():
        projected = attention.o_proj(found["L1_attn_out_prelinear"])
    if block in (Sequential, Parallel, AttentionOnly, ScaledAtTheEnd):
        assert torch.equal(projected, found["L1_attn_out"])
    if block is Scaled:
        assert torch.equal(projected * 0.22, found["L1_attn_out"])


def test_what_is_added_is_told_in_words():
    """A multiplier, a norm behind a branch and a bias belong to what is added."""
    told = {
        block: dissected(block)[0].readings[HookSite(0, "attn_out")].describe()
        for block in (Sequential, Sandwich, Scaled, Biased)
    }
    assert told == {
        Sequential: "output of layers.0.self_attn",
        Sandwich: "output of layers.0.post_attn_norm",
        Scaled: "(output of layers.0.self_attn) * 0.22",
        Biased: "output of layers.0.self_attn[0] + output of layers.0.self_attn[1]",
    }


def test_each_site_says_how_deep_a_pass_must_go():
    anatomy, _ = dissected(Sequential, Sequential)
    depths = {str(site): reading.depth for site, reading in anatomy.readings.items()}
    assert depths["embed"] == depths["L0_resid_pre"] == -1
    assert depths["L1_resid_pre"] == depths["L0_resid_post"] == depths["L0_attn_out"] == 0
    assert depths["L1_mlp_out"] == depths["L1_resid_post"] == 1
    assert depths["final_norm"] == 2


def test_widths_are_those_of_the_tensors():
    anatomy, model = dissected(Sequential)
    found = read(anatomy, model, torch.randn(TOKENS, HIDDEN))
    for site, reading in anatomy.readings.items():
        assert found[str(site)].shape == (TOKENS, reading.width)
    assert anatomy.readings[HookSite(0, "attn_out_prelinear")].width == 24


def test_blocks_of_several_types_are_told_apart():
    anatomy, _ = dissected(lambda: Sequential(mixer=MambaMixer), Sequential, AttentionOnly, Hidden)
    assert anatomy.block_types[:3] == ("mamba + mlp", "attention + mlp", "attention")
    assert "mamba_out" in kinds_of(anatomy, 0)
    assert "mamba_out" not in kinds_of(anatomy, 1)
    assert kinds_of(anatomy, 3) == STREAM
    assert anatomy.unexplained == (3,)


def test_blocks_whose_branches_run_side_by_side_say_so():
    anatomy, _ = dissected(Parallel, Sequential)
    assert anatomy.block_types == ("attention + mlp side by side", "attention + mlp")


def test_a_module_that_runs_in_several_blocks_is_no_place():
    """A shared attention's output belongs to no single layer."""
    shared = Attention()
    anatomy, _ = dissected(
        lambda: Sequential(mixer=lambda: shared), lambda: Sequential(mixer=lambda: shared)
    )
    assert "attn_out" not in kinds_of(anatomy, 0) | kinds_of(anatomy, 1)


def test_refused_sites_are_taken_out_and_nothing_else():
    anatomy, _ = dissected(Sequential, Sequential)
    site = HookSite(1, "attn_out")
    kept = anatomy.without({site})
    assert set(anatomy.readings) - set(kept.readings) == {site}
    assert kept.block_types == anatomy.block_types

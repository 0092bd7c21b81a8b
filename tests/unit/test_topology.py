"""The residual stream is found by evidence: toy models of every convention, and of none."""

import pytest
import torch
from torch import nn

from wllm_ray.capture.block_lists import find_block_lists
from wllm_ray.capture.probe import Probe
from wllm_ray.capture.reading import Place, Side
from wllm_ray.capture.topology import Residual, settle, stream_of
from wllm_ray.errors import CaptureError

pytestmark = pytest.mark.requirement("C-5")

TOKENS, HIDDEN, LAYERS = 6, 16, 3


class Norm(nn.Module):
    """An RMS norm that adds a residual where it is given one, in place as CUDA's fused one."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(HIDDEN) + 0.5)

    def forward(self, stream, residual=None):
        if residual is not None:
            residual += stream
            stream.copy_(residual)
        normed = stream / stream.pow(2).mean(-1, keepdim=True).add(1e-6).sqrt() * self.weight
        return normed if residual is None else (normed, residual)


class Block(nn.Module):
    """One block; ``convention`` says what it returns."""

    def __init__(self, convention):
        super().__init__()
        self.convention = convention
        self.mix = nn.Linear(HIDDEN, HIDDEN)
        self.norm = Norm()

    def forward(self, _positions, stream, residual=None):
        whole = stream + residual if self.convention == "pair" and residual is not None else stream
        branch = self.mix(self.norm(whole.clone()))
        return {
            "pair": (branch, whole.clone()),
            "stale": (whole + branch, whole.clone()),
            "none": (whole + branch, None),
            "single": (whole + branch,),
            "tensor": whole + branch,
            "batched": whole + branch,
            "three": (branch, whole, whole),
            "weights": (whole + branch, whole[:, :3]),
            "narrow": whole[:, :3],
            "object": object(),
        }[self.convention]


class Toy(nn.Module):
    """Embedding, blocks, final norm."""

    def __init__(self, convention="pair", before_norm=None, between=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block(convention) for _ in range(LAYERS))
        self.final = Norm()
        self.convention, self.between = convention, between
        self.before_norm = before_norm

    def forward(self):
        stream, residual = torch.randn(TOKENS, HIDDEN), None
        if self.convention == "batched":
            stream = stream[None]
        for block in self.blocks:
            output = block(torch.arange(TOKENS), stream, residual=residual)
            if isinstance(output, tuple):
                stream, residual = output[0], output[1] if len(output) > 1 else None
            else:
                stream = output
            if self.between:
                stream = self.between(stream)
        if self.before_norm:
            stream = self.before_norm(stream)
        pair = self.convention == "pair"
        return self.final(stream, residual) if pair else self.final(stream)


def settled(model, num_layers=LAYERS, hidden=HIDDEN):
    torch.manual_seed(0)
    lists = find_block_lists(model, num_layers)
    with torch.inference_mode(), Probe(model, lists, hidden, TOKENS) as probe:
        model()
    with torch.inference_mode():
        return settle(probe.log, lists, dict(model.named_modules()))


@pytest.mark.parametrize(
    ("convention", "residual"),
    [
        ("pair", Residual.SUM),
        ("stale", Residual.FIRST),
        ("none", Residual.FIRST),
        ("single", Residual.FIRST),
        ("weights", Residual.FIRST),
        ("tensor", Residual.TENSOR),
        ("batched", Residual.TENSOR),
    ],
)
def test_each_convention_is_settled(convention, residual):
    torch.manual_seed(1)
    model = Toy(convention)
    found = settled(model)
    assert found.residual is residual
    assert found.blocks_name == "blocks"
    assert found.blocks == tuple(model.blocks)
    assert found.final_norm is model.final
    assert found.evidence[residual] < 1e-5
    assert all(error > 0.05 for kind, error in found.evidence.items() if kind is not residual)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("convention", ["three", "narrow", "object"])
def test_a_structure_that_is_not_understood_is_named(convention):
    model = Toy("tensor")
    model.blocks = nn.ModuleList(Block(convention) for _ in range(LAYERS))
    model.convention = "other"
    model.final = nn.Identity()

    def forward():
        stream = torch.randn(TOKENS, HIDDEN)
        for block in model.blocks:
            block(torch.arange(TOKENS), stream)
        return model.final(stream)

    model.forward = forward
    with pytest.raises(CaptureError, match="the blocks of blocks return") as error:
        settled(model)
    assert error.value.code == "unknown_structure"


def test_blocks_that_return_different_things_are_refused():
    model = Toy("none")
    model.blocks[1] = Block("single")
    with pytest.raises(CaptureError, match="return different things"):
        settled(model)


def test_a_stream_that_is_changed_before_the_norm_is_refused():
    with pytest.raises(CaptureError, match="does not reproduce what final returned"):
        settled(Toy("tensor", before_norm=lambda stream: stream.roll(1, dims=-1)))


def test_a_stream_that_is_changed_between_blocks_is_refused():
    with pytest.raises(CaptureError, match="block 1 of blocks does not receive what block 0"):
        settled(Toy("tensor", between=lambda stream: stream * 1.5))


def test_two_candidates_that_explain_the_norm_equally_well_are_refused():
    """The stale residual is so small that the norm cannot tell; equal ones may be either."""

    class Tiny(Block):
        def forward(self, _positions, stream, residual=None):
            return stream + self.mix(stream), stream * 2e-7

    torch.manual_seed(1)
    model = Toy("stale")
    model.blocks = nn.ModuleList(Tiny("stale") for _ in range(LAYERS))
    with pytest.raises(CaptureError, match="equally well"):
        settled(model)


def test_no_list_of_the_right_length_is_refused():
    with pytest.raises(CaptureError, match=r"no list of 5 decoder blocks; .* blocks \(3\)"):
        settled(Toy(), num_layers=5)


def test_blocks_that_stand_in_two_lists_are_one_candidate():
    model = Toy("tensor")
    model.others = model.blocks
    model.twin = nn.ModuleList(model.blocks)
    assert set(find_block_lists(model, LAYERS)) == {"blocks"}
    assert settled(model).blocks_name == "blocks"


def test_two_lists_that_both_run_are_refused():
    class Twice(Toy):
        def forward(self):
            for block in self.towers:
                block(None, torch.randn(TOKENS, HIDDEN))
            return super().forward()

    model = Twice("tensor")
    model.towers = nn.ModuleList(Block("tensor") for _ in range(LAYERS))
    with pytest.raises(CaptureError, match="expected exactly one list"):
        settled(model)


def test_a_second_list_that_does_not_run_is_passed_over():
    model = Toy("pair")
    model.spare = nn.ModuleList(Block("pair") for _ in range(LAYERS))
    assert settled(model).blocks_name == "blocks"


def test_lists_inside_blocks_are_not_candidates():
    model = Toy("tensor")
    model.blocks[0].experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(LAYERS))
    assert set(find_block_lists(model, LAYERS)) == {"blocks"}


def test_without_a_final_norm_a_projection_of_every_token_speaks_for_the_stream():
    model = Toy("tensor")
    model.final = nn.Linear(HIDDEN, 9)
    found = settled(model)
    assert found.final_norm is model.final
    assert found.evidence == {Residual.TENSOR: 0.0}


def test_with_nothing_but_the_head_behind_the_blocks_the_model_is_refused():
    class LastTokenHead(nn.Linear):
        def forward(self, stream):
            return super().forward(stream[-1:])

    model = Toy("tensor")
    model.final = LastTokenHead(HIDDEN, 99)
    with pytest.raises(CaptureError, match=r"no module with an output of width 16.*'final'"):
        settled(model)


@pytest.mark.requirement("C-10")
def test_a_sum_is_made_in_the_models_own_dtype():
    one, two = (torch.randn(64, 32).bfloat16() for _ in range(2))
    stream = stream_of((one, two), Residual.SUM)
    assert stream.dtype == torch.bfloat16
    assert torch.equal(stream, one + two)
    assert not torch.equal(stream.float(), one.float() + two.float())


@pytest.mark.parametrize(
    ("convention", "paths", "entry"),
    [
        ("pair", [(0,), (1,)], [(0, 1)]),
        ("stale", [(0,)], [(0, 1)]),
        ("tensor", [()], [(0, 1)]),
        ("batched", [()], [(0, 1)]),
    ],
)
def test_where_the_stream_lies_around_each_block(convention, paths, entry):
    """Block 0 is given one tensor, although later blocks are given a pair."""
    torch.manual_seed(1)
    model = Toy(convention)
    found = settled(model)
    parts = found.parts_after(2)
    assert [part.path for part in parts] == paths
    assert {(p.place.module, p.place.name, p.place.side) for p in parts} == {
        (model.blocks[2], "blocks.2", Side.OUTPUT)
    }
    assert [part.path for part in found.parts_before()] == entry
    assert found.parts_before()[0].place == Place(model.blocks[0], "blocks.0", Side.INPUT)


def test_what_was_settled_is_told_in_one_line():
    torch.manual_seed(1)
    told = settled(Toy("pair")).describe()
    assert told.startswith("sum of the tuple's two elements of blocks; final replayed on each")
    assert "first element of the tuple" in told

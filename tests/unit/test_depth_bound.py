"""Forward passes that stop at a block, on a model of a few lines."""

import pytest
import torch
from torch import nn
from toy_models import LAYERS, VOCAB, Decoder, contexts_of

from wllm_ray.capture.depth import DepthBound

pytestmark = pytest.mark.requirement("C-6")

TOKENS = torch.arange(9) % VOCAB


@pytest.fixture
def model():
    return Decoder()


@pytest.fixture
def bound(model):
    return DepthBound(model, tuple(model.layers))


def run(model, bound, deepest):
    """One pass; returns what the model returned and what is wrong with the blocks that ran."""
    bound.begin(deepest)
    with torch.inference_mode():
        output = model(TOKENS, contexts_of(TOKENS))
    return output, bound.end()


@pytest.mark.parametrize("deepest", range(-1, LAYERS))
def test_nothing_above_the_deepest_block_runs(deepest, model, bound):
    entered = []
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda *_, name=name: entered.append(name))
    output, problem = run(model, bound, deepest)
    assert problem is None
    assert bound.ran == list(range(deepest + 1))
    inside = {f"layers.{layer}.self_attn" for layer in range(deepest + 1)}
    assert {name for name in entered if name.endswith("self_attn")} == inside
    assert "norm" not in entered
    # One row a token, of a width that nobody can mistake for a result.
    assert output.shape == (len(TOKENS), 1)


@pytest.mark.parametrize("deepest", [None, LAYERS])
def test_a_whole_pass_is_the_models_own(deepest, model, bound):
    output, problem = run(model, bound, deepest)
    expected = Decoder()(TOKENS, contexts_of(TOKENS))
    assert problem is None
    assert bound.ran == list(range(LAYERS))
    assert torch.equal(output, expected)


def test_a_pass_that_was_cut_leaves_nothing_behind(model, bound):
    whole, _ = run(model, bound, None)
    for deepest in (0, -1, 1):
        run(model, bound, deepest)
        again, problem = run(model, bound, None)
        assert problem is None
        assert torch.equal(again, whole)
    bound.remove()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(model(TOKENS, contexts_of(TOKENS)), whole)


class Stubborn(nn.Module):
    """A block that holds every exception and goes on."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *given):
        try:
            return self.block(*given)
        except BaseException:  # noqa: BLE001 (the fault)
            return self.block.forward(*given)


def test_blocks_that_ran_though_they_should_not_are_told(model):
    blocks = tuple(model.layers)
    bound = DepthBound(model, blocks)
    model.layers[1] = Stubborn(blocks[1])
    _, problem = run(model, bound, 1)
    assert problem == "blocks 0 to 1 should have run once each, those that ran: [0, 1, 2]"


def test_a_block_that_did_not_run_is_told(model, bound):
    model.layers = nn.ModuleList([model.layers[0], model.layers[2]])
    assert run(model, bound, None)[1] == (
        "blocks 0 to 2 should have run once each, those that ran: [0, 2]"
    )


def test_a_block_that_ran_twice_is_told(model, bound):
    model.layers.append(model.layers[2])
    _, problem = run(model, bound, None)
    assert problem is not None
    assert problem.endswith("[0, 1, 2, 2]")
    assert run(model, bound, 0)[1] is None


def test_a_stop_that_was_never_reached_is_told(model, bound):
    """The model does not come by the block on which the pass was to stop."""
    bound.begin(-1)
    with torch.inference_mode():
        model.embed(TOKENS)
    assert bound.end() is not None


def test_other_exceptions_leave_the_model_as_ever(model, bound):
    bound.begin(1)
    with pytest.raises(IndexError):
        model(torch.tensor([VOCAB]), contexts_of([0]))
    assert bound.end() is not None
    assert run(model, bound, 1)[1] is None

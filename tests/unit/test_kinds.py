"""Names that say what a branch is, where a model's own name is in all of them."""

import pytest
from torch import nn

from wllm_ray.capture.kinds import Kind, classify


def named(name):
    return type(name, (nn.Module,), {})()


@pytest.mark.requirement("C-9")
@pytest.mark.parametrize(
    ("name", "class_name", "kind"),
    [
        ("self_attn", "LlamaAttention", Kind.ATTENTION),
        ("temporal_block", "RecurrentGemmaRecurrentBlock", Kind.MIXER),
        ("temporal_block", "RecurrentGemmaSdpaAttention", Kind.ATTENTION),
        ("mlp_block", "RecurrentGemmaMlp", Kind.MLP),
        ("linear_attn", "QwenGatedDeltaNetAttention", Kind.MIXER),
        ("mixer", "MambaMixer2", Kind.MAMBA),
        ("mixer", "NemotronHMLP", Kind.MLP),
        ("mlp", "SeedOssMLP", Kind.MLP),
        ("fc2", "RowParallelLinear", Kind.MLP),
        ("mix", "Mix", Kind.UNKNOWN),
    ],
)
def test_a_branch_is_called_what_its_names_say(name, class_name, kind):
    assert classify(name, named(class_name)) is kind

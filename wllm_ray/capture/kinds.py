"""What a module inside a decoder block is: attention, a state-space mixer, a feed-forward, experts.

Names only say which of a block's branches is which. *Where* a branch is added and what exactly is
added is settled by arithmetic in :mod:`wllm_ray.capture.anatomy`.
"""

from __future__ import annotations

import re
from enum import StrEnum

from torch import nn

__all__ = ["Kind", "block_type", "classify", "only_shapes"]

_MIXER = re.compile(
    r"linear_?attn|linear_?attention|delta_?net|kda|short_?conv|rwkv|retention|lightning|recurrent_?block|rg_?lru",
    re.IGNORECASE,
)
# Not any "ssm": that is in `GptOssMLP`, too.
_MAMBA = re.compile(r"(?i:mamba)|SSM|(?<![a-zA-Z])ssm")
_ATTENTION = re.compile(r"attn|attention|mla\b", re.IGNORECASE)
_FORWARD = re.compile(
    r"mlp|ffn|feed_?forward|(^|[._ ])ff([._ ]|$)|(^|[._])fc\d|dense|moe|expert|glu", re.IGNORECASE
)
_SHAPES = re.compile(r"norm|dropout|identity", re.IGNORECASE)
_ACTIVATION = re.compile(r"^act|activation", re.IGNORECASE)
_EXPERTS = re.compile(r"(?<!shared)experts?$|fusedmoe|sparsemoe|moeblock", re.IGNORECASE)


class Kind(StrEnum):
    """What a branch of a block computes."""

    ATTENTION = "attention"
    MAMBA = "mamba"
    MIXER = "mixer"
    MLP = "mlp"
    MOE = "moe"
    UNKNOWN = "unknown"

    @property
    def mixes(self) -> bool:
        """Whether it moves information between tokens."""
        return self in (Kind.ATTENTION, Kind.MAMBA, Kind.MIXER)


def classify(name: str, module: nn.Module) -> Kind:
    """The kind of a branch.

    Args:
        name: The module's dotted name inside its block.
        module: The module whose output is the branch, before any norm that follows it.
    """
    # vLLM's own mixers with a state say what they are.
    for part in module.modules():
        stated = getattr(part, "mamba_type", None)
        if isinstance(stated, str):
            return Kind.MAMBA if stated.startswith("mamba") else Kind.MIXER
    text = f"{name} {type(module).__name__}"
    if _MIXER.search(text):
        return Kind.MIXER
    # The class says more than the place: some models call every mixer `mamba` or `mixer`.
    for seen in (type(module).__name__, name):
        if _MAMBA.search(seen) and not _ATTENTION.search(seen):
            return Kind.MAMBA
        if _ATTENTION.search(seen):
            return Kind.ATTENTION
    if _has_experts(module):
        return Kind.MOE
    # A name that says nothing could be a mixer's as well.
    return Kind.MLP if _FORWARD.search(text) else Kind.UNKNOWN


def _has_experts(module: nn.Module) -> bool:
    return any(
        _EXPERTS.search(type(part).__name__) or name.rpartition(".")[2] == "experts"
        for name, part in module.named_modules()
    )


def only_shapes(module: nn.Module) -> bool:
    """Whether a module only rescales or passes on what it is given: a norm, a dropout.

    Its class says so; its weights do not, because engines pack matrices away.
    """
    return not list(module.children()) and bool(_SHAPES.search(type(module).__name__))


def block_type(block: nn.Module) -> str:
    """What a block is made of, in words: ``attention + mlp``."""
    kinds = [
        classify(name, child)
        for name, child in block.named_children()
        if not only_shapes(child) and not _ACTIVATION.search(name)
    ]
    parts = [kind.value for kind in kinds if kind is not Kind.UNKNOWN]
    return " + ".join(dict.fromkeys(parts)) or type(block).__name__

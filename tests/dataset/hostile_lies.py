"""What a lie is, and the datasets that lies are told about."""

from __future__ import annotations

from dataclasses import dataclass, field

from wllm_ray.dataset.format.manifest import TraceSpec

SITES = ("embed", "L1_attn_out_prelinear")
PER_SITE = {"sites": SITES, "site_widths": (4, 6), "position": "all_prompt"}
TRACE = TraceSpec(sites=(*SITES, "L2_mlp_out"), site_widths=(4, 6, 3))
# What the lies are told about: options of `dataset_builders.make_spec`.
BASES = {
    "npy": {},
    "arrow": {"shard_format": "arrow"},
    "sites": PER_SITE,
    "traces": PER_SITE | {"trace": TRACE, "shard_format": "arrow"},
}

INVALID = "manifest_invalid"
CONTRADICTS = "rows_inconsistent"


@dataclass(frozen=True)
class Lie:
    """One way to lie.

    Attributes:
        tell: Damages a :class:`forging.Forgery`.
        code: Of the error that refuses it.
        stage: When it is found out, where nobody asked for more.
        base: Which of :data:`BASES` it is told about.
    """

    tell: object = field(repr=False)
    code: str
    stage: str
    base: str = "npy"

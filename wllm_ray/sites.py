"""Hook sites: which place inside the model, at which layer.

A site has one canonical name: ``L12_resid_post`` for a kind at a zero-based decoder block,
``embed`` and ``final_norm`` for the two that belong to no block. Other spellings are accepted on
input and never stored.

``L{k}_resid_post`` is the stream after the last residual addition of block *k* and before the next
norm. It equals Transformers' ``hidden_states[k + 1]``, except for the last block, whose entry in
``hidden_states`` has already passed the final norm. TransformerLens calls it
``blocks.k.hook_resid_post``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from wllm_ray.errors import InvalidInputError

__all__ = ["BLOCK_KINDS", "MODEL_KINDS", "SITE_KINDS", "HookSite", "parse_site", "resolve_sites"]

BLOCK_KINDS = (
    "resid_pre",
    "resid_mid",
    "resid_post",
    "attn_out",
    "attn_out_prelinear",
    "mlp_out",
    "moe_out",
    "mamba_out",
    "mixer_out",
)
MODEL_KINDS = ("embed", "final_norm")
SITE_KINDS = (*BLOCK_KINDS, *MODEL_KINDS)

_KIND_ALIASES = {"block": "resid_post"}
_LENS_KINDS = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
_CANONICAL = re.compile(r"L(0|[1-9][0-9]{0,5})_([a-z_]+)")
_LENS = re.compile(r"blocks\.(0|[1-9][0-9]{0,5})\.hook_([a-z_]+)")


@dataclass(frozen=True, slots=True)
class HookSite:
    """One place inside the model: ``HookSite(12, "resid_post")``, as text ``L12_resid_post``.

    Raises:
        InvalidInputError: An unknown kind, a negative layer, a layer where the kind has none, or
            none where it needs one.
    """

    layer: int | None
    kind: str

    def __post_init__(self) -> None:
        if self.kind not in SITE_KINDS:
            raise InvalidInputError(
                f"unknown site kind {self.kind!r}; write for example resid_post (what a served "
                f"model offers is in its /v1/extraction-schema)",
                code="invalid_site",
            )
        if (self.layer is None) != (self.kind in MODEL_KINDS):
            need = "carries no layer" if self.kind in MODEL_KINDS else "needs a layer"
            raise InvalidInputError(
                f"site kind {self.kind!r} {need}, found layer {self.layer!r}", code="invalid_site"
            )
        if self.layer is not None and self.layer < 0:
            raise InvalidInputError(
                f"layers are zero-based block indices, found {self.layer}",
                code="layer_out_of_range",
            )

    def __str__(self) -> str:
        return self.kind if self.layer is None else f"L{self.layer}_{self.kind}"

    @classmethod
    def parse(cls, text: str) -> HookSite:
        """Read a canonical name or an alias; see :func:`parse_site`."""
        return parse_site(text)


def parse_site(text: str) -> HookSite:
    """Read ``L12_resid_post``, ``L12_block``, ``blocks.12.hook_resid_post``, ``embed`` and so on.

    Raises:
        InvalidInputError: The text is none of these (code ``invalid_site``).
    """
    if text in MODEL_KINDS:
        return HookSite(None, text)
    if match := _CANONICAL.fullmatch(text):
        return HookSite(int(match[1]), _KIND_ALIASES.get(match[2], match[2]))
    if (match := _LENS.fullmatch(text)) and match[2] in _LENS_KINDS:
        return HookSite(int(match[1]), match[2])
    raise InvalidInputError(
        f"cannot read hook site {text!r}; write for example L12_resid_post, the stream after "
        f"block 12",
        code="invalid_site",
    )


def resolve_sites(
    layers: Sequence[int] | None,
    site: str,
    sites: Iterable[str] | None,
    *,
    num_layers: int,
) -> tuple[HookSite, ...]:
    """The union of ``layers`` × ``site`` and ``sites``, in the order asked for.

    Args:
        layers: Zero-based block indices that ``site`` applies to; order kept.
        site: The site kind for ``layers`` (``block`` means ``resid_post``).
        sites: Further sites by name.
        num_layers: How many decoder blocks the model has.

    Raises:
        InvalidInputError: Nothing asked, a duplicate, an unknown kind, or a layer that the model
            does not have.
    """
    wanted = [HookSite(layer, _KIND_ALIASES.get(site, site)) for layer in layers or ()]
    wanted += [parse_site(name) for name in sites or ()]
    if not wanted:
        raise InvalidInputError(
            "no hook site asked for; give `layers`, `sites` or both", code="invalid_site"
        )
    for position, one in enumerate(wanted):
        if one in wanted[:position]:
            raise InvalidInputError(
                f"hook site {one} is listed twice; list each once", code="invalid_site"
            )
        if one.layer is not None and one.layer >= num_layers:
            raise InvalidInputError(
                f"layer {one.layer} does not exist: the model has {num_layers} blocks, "
                f"numbered 0 to {num_layers - 1}",
                code="layer_out_of_range",
            )
    return tuple(wanted)

"""Where Transformers keeps each site: written by hand from its modelling code, family by family.

An independent truth: nothing here is asked of wllm_ray or vLLM. What is not listed does not exist
on that family, or is not what its name promises, and must not be offered there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tiny_configs import LAYERS


@dataclass(frozen=True)
class Branch:
    """What is added to the stream: the sum of these modules' outputs, times an attribute."""

    modules: tuple[str, ...]
    times: str | None = None


@dataclass(frozen=True)
class Layout:
    """One block; dotted names are below the block.

    ``mid`` is the module that reads the stream between the two branches, ``prelinear`` the
    attention's output projection.
    """

    adds: Mapping[str, Branch]
    mid: str | None = None
    prelinear: str | None = None

    @property
    def kinds(self):
        """Site kinds of this block."""
        found = {"resid_pre", "resid_post", *self.adds}
        found |= {"resid_mid"} if self.mid else set()
        return found | ({"attn_out_prelinear"} if self.prelinear else set())


@dataclass(frozen=True)
class Structure:
    """A model: its blocks, and its last norm as a name beside the list of blocks.

    ``attention`` is how Transformers must compute it where its own choice is wrong.
    """

    blocks: tuple[Layout, ...]
    final_norm: str | None = "norm"
    attention: str | None = None


# Two names for what a Mamba mixer adds.
_MAMBA = ("mamba_out", "mixer_out")
_AFTER = "post_attention_layernorm"


def _block(
    mixer="self_attn",
    mlp="mlp",
    mid=None,
    *,
    kinds=("attn_out",),
    prelinear=None,
    times=None,
    experts=False,
):
    """One mixer and one feed-forward, in sequence where there is a ``mid``.

    ``kinds`` is what the mixer's output is called; ``mlp`` may be a sum of modules.
    """
    adds = dict.fromkeys(kinds, Branch((mixer,), times))
    adds |= dict.fromkeys(
        ("mlp_out", "moe_out") if experts else ("mlp_out",), Branch(tuple(mlp.split(" + ")), times)
    )
    projection = prelinear or f"{mixer}.o_proj"
    return Layout(adds, mid, projection if "attn_out" in kinds else None)


def _alike(block, final_norm="norm"):
    return Structure((block,) * LAYERS, final_norm)


def _one_part(*kinds, prelinear=None):
    """A block whose only part is called ``mixer``."""
    return Layout(dict.fromkeys(kinds, Branch(("mixer",))), None, prelinear)


_LLAMA = _block(mid=_AFTER)
_MIXTRAL = _block(mid=_AFTER, experts=True)
# A norm after each part, and one before the feed-forward or none.
_SANDWICH = _block(
    "post_attention_layernorm",
    "post_feedforward_layernorm",
    "pre_feedforward_layernorm",
    prelinear="self_attn.o_proj",
)
_NORM_AFTER = replace(_SANDWICH, mid="mlp")
# The block scales its sum at the end, so that nothing is what the feed-forward added.
_SCALED_AT_THE_END = replace(_SANDWICH, adds={"attn_out": _SANDWICH.adds["attn_out"]})
_FALCON = _block("self_attention", prelinear="self_attention.dense")
_NEOX = _block("attention", prelinear="attention.dense")


def _granite(mixer="self_attn", mlp="mlp", **others):
    return _block(mixer, mlp, _AFTER, times="residual_multiplier", **others)


def _granite_hybrid(mlp, *, experts):
    mamba = _granite("mamba", mlp, kinds=_MAMBA, experts=experts)
    return Structure((mamba, _granite(mlp=mlp, experts=experts), mamba, mamba))


def _lfm2(experts):
    """Short convolution and attention in turns; ``experts`` says which blocks have them."""
    conv = {"mixer": "conv", "kinds": ("mixer_out",)}
    attention = {"mixer": "self_attn", "prelinear": "self_attn.out_proj"}
    blocks = [
        _block(mlp="feed_forward", mid="ffn_norm", experts=one, **mixer)
        for one, mixer in zip(experts, (conv, attention, conv, attention), strict=True)
    ]
    return Structure(tuple(blocks), "embedding_norm")


def _nemotron_h():
    mamba = _one_part(*_MAMBA)
    attention = _one_part("attn_out", prelinear="mixer.o_proj")
    return Structure((mamba, _one_part("mlp_out"), attention, mamba), "norm_f")


# fmt: off
_LLAMA_LIKE = (
    "qwen2", "qwen3", "llama", "mistral", "phi3", "ernie4_5", "seed_oss", "smollm3", "nemotron",
    "starcoder2", "stablelm", "glm", "olmo", "gemma",
)
# fmt: on
_MIXTRAL_LIKE = ("mixtral", "phimoe", "gpt_oss", "olmoe")

STRUCTURES = {
    **dict.fromkeys(_LLAMA_LIKE, _alike(_LLAMA)),
    "apertus": _alike(_block(mid="feedforward_layernorm")),
    "granite": _alike(_granite()),
    "glm4": _alike(
        _block(
            "post_self_attn_layernorm",
            "post_mlp_layernorm",
            _AFTER,
            prelinear="self_attn.o_proj",
        )
    ),
    "hyperclovax": _alike(
        _block(
            "post_norm1",
            "post_norm2",
            _AFTER,
            prelinear="self_attn.o_proj",
            times="residual_multiplier",
        )
    ),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), _alike(_NORM_AFTER)),
    # Transformers' own choice leaves out the soft cap.
    "gemma2": replace(_alike(_SANDWICH), attention="eager"),
    "gemma3": _alike(_SANDWICH),
    **dict.fromkeys(("gemma4", "gemma4_per_layer"), _alike(_SCALED_AT_THE_END)),
    "minicpm3": _alike(_block(mid=_AFTER, times="residual_scale")),
    "gpt2": _alike(_block("attn", "mlp", "ln_2", prelinear="attn.c_proj"), "ln_f"),
    "gptj": _alike(_block("attn", prelinear="attn.out_proj"), "ln_f"),
    "gpt_neox": _alike(_NEOX, "final_layer_norm"),
    "gpt_neox_sequential": _alike(replace(_NEOX, mid=_AFTER), "final_layer_norm"),
    "phi": _alike(_block(prelinear="self_attn.dense"), "final_layernorm"),
    **dict.fromkeys(("cohere", "cohere2"), _alike(_block())),
    **dict.fromkeys(("falcon", "falcon_7b"), _alike(_FALCON, "ln_f")),
    "falcon_rw": _alike(replace(_FALCON, mid=_AFTER), "ln_f"),
    # Its modules return what they add plus the stream; their last layers do not.
    "bloom": _alike(
        _block(
            "self_attention.dense",
            "mlp.dense_4h_to_h",
            _AFTER,
            prelinear="self_attention.dense",
        ),
        "ln_f",
    ),
    "opt": _alike(
        _block("self_attn", "fc2", "final_layer_norm", prelinear="self_attn.out_proj"),
        "final_layer_norm",
    ),
    # Normalises the stream itself after each addition, so that no sum leads out of a block.
    "opt_350m": _alike(
        Layout({"attn_out": Branch(("self_attn",))}, "self_attn_layer_norm", "self_attn.out_proj"),
        None,
    ),
    **dict.fromkeys(_MIXTRAL_LIKE, _alike(_MIXTRAL)),
    "granitemoe": _alike(_granite(mlp="block_sparse_moe", experts=True)),
    "granitemoeshared": _alike(_granite(mlp="block_sparse_moe + shared_mlp", experts=True)),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe"), Structure((_MIXTRAL, _LLAMA, _MIXTRAL, _MIXTRAL))),
    **dict.fromkeys(
        ("glm4_moe", "deepseek_v2", "deepseek_v3"),
        Structure((_LLAMA, _MIXTRAL, _MIXTRAL, _MIXTRAL)),
    ),
    "mamba2": _alike(_one_part(*_MAMBA), "norm_f"),
    "nemotron_h": _nemotron_h(),
    "falcon_h1": _alike(
        Layout(
            {
                "attn_out": Branch(("self_attn",), "attn_out_multiplier"),
                **dict.fromkeys(_MAMBA, Branch(("mamba",), "ssm_out_multiplier")),
                "mlp_out": Branch(("feed_forward",)),
            },
            "pre_ff_layernorm",
            "self_attn.o_proj",
        ),
        "final_layernorm",
    ),
    "granite_hybrid": _granite_hybrid("shared_mlp", experts=False),
    "granite_hybrid_moe": _granite_hybrid("block_sparse_moe + shared_mlp", experts=True),
    "lfm2": _lfm2((False,) * LAYERS),
    "lfm2_moe": _lfm2((False, True, True, True)),
    "qwen3_next": Structure(
        (_block("linear_attn", mid=_AFTER, kinds=("mixer_out",), experts=True), _MIXTRAL)
        * (LAYERS // 2)
    ),
}

"""Tiny random models with wide weights: quick to build in a test, odd enough to catch faults.

Norm weights are random too, so that a forgotten or doubled norm shows. ``head_dim`` is 32, the
least that vLLM's CPU attention takes. Each is saved with a tokenizer that is trained here.
"""

import os
from pathlib import Path

# Before transformers is imported: nothing here may ask a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    CohereConfig,
    DeepseekV2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    GraniteMoeHybridConfig,
    LlamaConfig,
    Olmo2Config,
    OPTConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    StableLmConfig,
)

LAYERS = 4
HIDDEN = 128
VOCAB = 512
MAX_LEN = 320

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_MULTI_HEAD = _COMMON | {"num_key_value_heads": 4}


def _gemma3() -> PreTrainedConfig:
    return Gemma3TextConfig(
        **_COMMON | {"tie_word_embeddings": True},
        head_dim=32,
        query_pre_attn_scalar=32,
        sliding_window=64,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"]
        + ["sliding_attention"] * (LAYERS - 3),
    )


def _gpt2() -> PreTrainedConfig:
    return GPT2Config(
        vocab_size=VOCAB,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=4,
        n_positions=MAX_LEN,
        initializer_range=0.2,
        bos_token_id=1,
        eos_token_id=2,
    )


def _granite() -> PreTrainedConfig:
    return GraniteConfig(
        **_COMMON,
        embedding_multiplier=3.0,
        residual_multiplier=0.3,
        attention_multiplier=0.1,
        logits_scaling=2.0,
    )


def _deepseek_v2() -> PreTrainedConfig:
    """Latent attention, which vLLM takes at ranks that add up to 576."""
    return DeepseekV2Config(
        **_MULTI_HEAD,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=32,
        qk_rope_head_dim=64,
        v_head_dim=32,
        first_k_dense_replace=1,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_group=1,
        topk_group=1,
        topk_method="greedy",
    )


def _opt_350m() -> PreTrainedConfig:
    """Norms at the end of each block, none at the end of the model, a narrower head."""
    return OPTConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        ffn_dim=256,
        word_embed_proj_dim=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        max_position_embeddings=MAX_LEN,
        init_std=0.2,
        do_layer_norm_before=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def _granite_hybrid() -> PreTrainedConfig:
    """Three Mamba2 layers and one of attention, dense."""
    return GraniteMoeHybridConfig(
        **_COMMON,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=HIDDEN,
        embedding_multiplier=3.0,
        residual_multiplier=0.3,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_chunk_size=64,
    )


FAMILIES = {
    "qwen3": lambda: Qwen3Config(**_COMMON, head_dim=32),
    "llama": lambda: LlamaConfig(**_COMMON),
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "olmo2": lambda: Olmo2Config(**_MULTI_HEAD),
    "gpt_neox": lambda: GPTNeoXConfig(
        **{k: v for k, v in _COMMON.items() if k != "num_key_value_heads"}
    ),
    "cohere": lambda: CohereConfig(**_COMMON | {"tie_word_embeddings": True}),
    "stablelm": lambda: StableLmConfig(**_COMMON),
    "granite": _granite,
    "deepseek_v2": _deepseek_v2,
    "granite_hybrid": _granite_hybrid,
    "opt_350m": _opt_350m,
}


def _train_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = ("layer", "stream", "probe", "prompt", "token", "norm", "block", "head", "row", "shard")
    corpus = [f"the {a} of a {b} reads every {c}" for a in words for b in words for c in words]
    tokenizer.train_from_iterator(corpus, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )


def _randomise(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                noise = torch.randn(parameter.shape, generator=generator) * 0.3
                parameter.add_(noise)


def build_tiny_model(family: str, path: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Save a tiny random model of ``family`` (a key of ``FAMILIES``) and its tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]())
    _randomise(model)
    model.to(dtype).save_pretrained(path)
    _train_tokenizer().save_pretrained(path)
    return path

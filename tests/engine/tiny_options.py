"""Sizes of the tiny models, and options that several of their configurations have in common."""

LAYERS = 4
HIDDEN = 128
VOCAB = 512
MAX_LEN = 320


def without(options, *names):
    return {name: value for name, value in options.items() if name not in names}


TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
MULTI_HEAD = TOKENS | {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
GROUPED = MULTI_HEAD | {"num_key_value_heads": 2}
TIED = GROUPED | {"tie_word_embeddings": True}
HEAD = {"head_dim": 32}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": MAX_LEN // 4,
}
WINDOWS = {"sliding_window": 64}
WINDOWS |= {"layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"]}
GEMMA4 = TIED | HEAD | {"sliding_window": 64}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
# Never reached: vLLM's window for these is one token wider than Transformers'.
WIDE = {"sliding_window": 2 * MAX_LEN}
GPT2 = TOKENS | {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
}
FEW_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
SMALL_EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 64}
OPT = without(MULTI_HEAD, "intermediate_size", "initializer_range", "tie_word_embeddings")
OPT |= {"ffn_dim": 256, "init_std": 0.2}
# vLLM takes its feed-forward to be four times as wide as the stream.
FALCON = without(MULTI_HEAD, "intermediate_size")
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
SHORT_CONV = {
    "conv_dim": HIDDEN,
    "block_dim": HIDDEN,
    "layer_types": ["conv", "full_attention"] * (LAYERS // 2),
}
# Latent attention, which vLLM takes on a CPU at ranks that add up to 576.
LATENT = MULTI_HEAD | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "n_group": 1,
    "topk_group": 1,
}

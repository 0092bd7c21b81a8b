"""Configurations of tiny models, one a family: small, and unlike its neighbours in structure.

``head_dim`` is 32, the least that vLLM's CPU attention takes. Multipliers differ from one and
biases are there where a family can have them, so that a capture that forgets one is found out.
"""

import os

# Before transformers is imported: nothing here may ask a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers as hf

LAYERS = 4
HIDDEN = 128
VOCAB = 512
MAX_LEN = 320


def _without(options, *names):
    return {name: value for name, value in options.items() if name not in names}


_TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_MULTI_HEAD = _TOKENS | {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
_GROUPED = _MULTI_HEAD | {"num_key_value_heads": 2}
_TIED = _GROUPED | {"tie_word_embeddings": True}
_HEAD = {"head_dim": 32}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": MAX_LEN // 4,
}
_WINDOWS = {"sliding_window": 64}
_WINDOWS |= {"layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"]}
_GEMMA4 = _TIED | _HEAD | {"sliding_window": 64}
_GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * (LAYERS // 2)}
# Never reached: vLLM's window for these is one token wider than Transformers'.
_WIDE = {"sliding_window": 2 * MAX_LEN}
_GPT2 = _TOKENS | {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 4}
_MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.3,
    "attention_multiplier": 0.1,
    "logits_scaling": 2.0,
}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
_SMALL_EXPERTS = {"num_experts_per_tok": 2, "num_experts": 4, "moe_intermediate_size": 64}
_OPT = _without(_MULTI_HEAD, "intermediate_size", "initializer_range", "tie_word_embeddings")
_OPT |= {"ffn_dim": 256, "init_std": 0.2}
# vLLM takes its feed-forward to be four times as wide as the stream.
_FALCON = _without(_MULTI_HEAD, "intermediate_size")
_MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}
# Latent attention, which vLLM takes on a CPU at ranks that add up to 576.
_LATENT = _MULTI_HEAD | {
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

DENSE = {
    "qwen2": lambda: hf.Qwen2Config(**_GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**_GROUPED, **_HEAD),
    "llama": lambda: hf.LlamaConfig(**_GROUPED),
    "mistral": lambda: hf.MistralConfig(**_GROUPED, **_HEAD, sliding_window=64),
    "phi3": lambda: hf.Phi3Config(**_GROUPED),
    "ernie4_5": lambda: hf.Ernie4_5Config(**_GROUPED, **_HEAD),
    "seed_oss": lambda: hf.SeedOssConfig(
        **_GROUPED, **_HEAD, attention_dropout=0.0, residual_dropout=0.0
    ),
    "smollm3": lambda: hf.SmolLM3Config(**_GROUPED, no_rope_layers=[1, 0, 1, 1]),
    "apertus": lambda: hf.ApertusConfig(**_GROUPED, rope_parameters=_ROPE),
    "nemotron": lambda: hf.NemotronConfig(**_GROUPED, **_HEAD),
    "starcoder2": lambda: hf.Starcoder2Config(**_GROUPED),
    "stablelm": lambda: hf.StableLmConfig(**_GROUPED),
    "granite": lambda: hf.GraniteConfig(**_GROUPED, **_MULTIPLIERS),
    "glm": lambda: hf.GlmConfig(**_GROUPED, **_HEAD),
    "glm4": lambda: hf.Glm4Config(**_GROUPED, **_HEAD),
    "olmo": lambda: hf.OlmoConfig(**_GROUPED),
    "olmo2": lambda: hf.Olmo2Config(**_MULTI_HEAD),
    "olmo3": lambda: hf.Olmo3Config(**_MULTI_HEAD, **_WIDE),
    "exaone4": lambda: hf.Exaone4Config(**_GROUPED, **_WIDE),
    "gemma": lambda: hf.GemmaConfig(**_TIED, **_HEAD),
    "gemma2": lambda: hf.Gemma2Config(**_TIED, **_HEAD, query_pre_attn_scalar=32, **_WINDOWS),
    "gemma3": lambda: hf.Gemma3TextConfig(**_TIED, **_HEAD, query_pre_attn_scalar=32, **_WINDOWS),
    "gemma4": lambda: hf.Gemma4TextConfig(
        **_GEMMA4, global_head_dim=64, hidden_size_per_layer_input=0
    ),
    "gemma4_per_layer": lambda: hf.Gemma4TextConfig(
        **_GEMMA4,
        global_head_dim=32,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=VOCAB,
    ),
    "minicpm3": lambda: hf.MiniCPM3Config(
        **_MULTI_HEAD,
        num_key_value_heads=4,
        kv_lora_rank=64,
        q_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=64,
        scale_emb=3,
        scale_depth=1.4,
        dim_model_base=64,
    ),
    "gpt2": lambda: hf.GPT2Config(**_GPT2, n_positions=MAX_LEN, initializer_range=0.2),
    "gptj": lambda: hf.GPTJConfig(
        **_GPT2, n_positions=MAX_LEN, rotary_dim=16, initializer_range=0.2
    ),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_MULTI_HEAD),
    "gpt_neox_sequential": lambda: hf.GPTNeoXConfig(**_MULTI_HEAD, use_parallel_residual=False),
    "phi": lambda: hf.PhiConfig(**_MULTI_HEAD),
    "cohere": lambda: hf.CohereConfig(**_TIED),
    "cohere2": lambda: hf.Cohere2Config(**_TIED, **_HEAD, **_WIDE),
    "falcon": lambda: hf.FalconConfig(**_FALCON, num_kv_heads=2, new_decoder_architecture=True),
    "falcon_7b": lambda: hf.FalconConfig(**_FALCON),
    "falcon_rw": lambda: hf.FalconConfig(
        **_FALCON, parallel_attn=False, multi_query=False, alibi=True, bias=True
    ),
    "bloom": lambda: hf.BloomConfig(
        **_TOKENS,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        n_layer=LAYERS,
        n_head=4,
        seq_length=MAX_LEN,
        initializer_range=0.2,
    ),
    "opt": lambda: hf.OPTConfig(**_OPT),
    # Norms at the end of each block, none at the end of the model, a narrower head.
    # Weights wide enough that its tokens do not all come to look alike.
    "opt_350m": lambda: hf.OPTConfig(
        **_OPT | {"init_std": 0.3}, word_embed_proj_dim=64, do_layer_norm_before=False
    ),
}

EXPERTS = {
    "mixtral": lambda: hf.MixtralConfig(**_GROUPED, **_EXPERTS),
    "phimoe": lambda: hf.PhimoeConfig(
        **_GROUPED, **_EXPERTS, attention_bias=True, lm_head_bias=True
    ),
    "granitemoe": lambda: hf.GraniteMoeConfig(**_GROUPED, **_EXPERTS, **_MULTIPLIERS),
    "gpt_oss": lambda: hf.GptOssConfig(
        **_GROUPED,
        **_HEAD,
        **_EXPERTS,
        sliding_window=64,
        rope_parameters=_YARN,
    ),
    "olmoe": lambda: hf.OlmoeConfig(**_MULTI_HEAD, num_experts=4, num_experts_per_tok=2),
    # The second block is dense.
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(
        **_GROUPED, **_SMALL_EXPERTS, shared_expert_intermediate_size=128, mlp_only_layers=[1]
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **_GROUPED, **_HEAD, **_SMALL_EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **_GROUPED,
        **_HEAD,
        num_experts_per_tok=2,
        n_routed_experts=4,
        moe_intermediate_size=64,
        use_qk_norm=True,
        num_nextn_predict_layers=0,
    ),
    "deepseek_v2": lambda: hf.DeepseekV2Config(**_LATENT, q_lora_rank=None, topk_method="greedy"),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **_LATENT,
        q_lora_rank=64,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        num_nextn_predict_layers=0,
    ),
}

HYBRIDS = {
    "mamba2": lambda: hf.Mamba2Config(
        **_TOKENS,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_heads=8,
        head_dim=32,
        state_size=32,
        n_groups=1,
        chunk_size=64,
        initializer_range=0.2,
        tie_word_embeddings=False,
    ),
    # Blocks of one part each. Transformers clamps time steps at `time_step_min`, vLLM does not.
    "nemotron_h": lambda: hf.NemotronHConfig(
        **_without(_GROUPED, "num_hidden_layers", "initializer_range", "intermediate_size"),
        **_HEAD,
        intermediate_size=64,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention"],
        ssm_state_size=32,
        mamba_num_heads=8,
        mamba_head_dim=32,
        n_groups=1,
        chunk_size=64,
        time_step_min=1e-9,
        time_step_floor=1e-9,
        initializer_range=0.1,
    ),
    # Attention and Mamba2 side by side in every block.
    "falcon_h1": lambda: hf.FalconH1Config(
        **_GROUPED,
        **_MAMBA2,
        mamba_d_ssm=256,
        embedding_multiplier=3.0,
        attention_in_multiplier=0.9,
        attention_out_multiplier=0.7,
        ssm_in_multiplier=1.2,
        ssm_out_multiplier=0.6,
        key_multiplier=0.8,
        mlp_multipliers=[0.9, 0.5],
        ssm_multipliers=[0.9, 1.1, 0.8, 1.2, 0.7],
    ),
    "granite_hybrid": lambda: hf.GraniteMoeHybridConfig(
        **_GROUPED,
        **_MULTIPLIERS,
        **_MAMBA2,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=HIDDEN,
    ),
    "granite_hybrid_moe": lambda: hf.GraniteMoeHybridConfig(
        **_GROUPED,
        **_MULTIPLIERS,
        **_MAMBA2,
        **_EXPERTS,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        shared_intermediate_size=HIDDEN,
    ),
    "lfm2": lambda: hf.Lfm2Config(
        **_GROUPED,
        conv_dim=HIDDEN,
        block_dim=HIDDEN,
        block_auto_adjust_ff_dim=False,
        layer_types=["conv", "full_attention", "conv", "full_attention"],
    ),
}

FAMILIES = DENSE | EXPERTS | HYBRIDS

# One of each structure that a capture must tell apart.
QUICK = (
    "llama",
    "gemma3",  # a norm after each part
    "gemma4",  # blocks of unequal width, scaled at the end
    "gpt2",
    "cohere",  # parts side by side; vLLM returns a tuple whose second element is stale
    "granite",  # multipliers
    "gpt_neox",  # Transformers' own class, run by vLLM
    "falcon_rw",  # vLLM's modules return their bias beside their output
    "opt_350m",  # norms on the stream itself
    "qwen2_moe",  # experts, and one block without
    "granite_hybrid",  # Mamba2 and attention in turns
    "falcon_h1",  # Mamba2 and attention side by side
    "lfm2",  # short convolutions
)

# What must stand in config.json for vLLM, and Transformers does not write.
SPELLED = {"phimoe": {"architectures": ["PhiMoEForCausalLM"]}}

"""Configurations of tiny models, one a family: small, and unlike its neighbours in structure.

``head_dim`` is 32, the least that vLLM's CPU attention takes. Multipliers differ from one and
biases are there where a family can have them, so that a capture that forgets one is found out.
"""

import os

# Before transformers is imported: nothing here may ask a hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers as hf
from tiny_options import (
    FALCON,
    FEW_EXPERTS,
    GEMMA4,
    GPT2,
    GROUPED,
    HEAD,
    HIDDEN,
    LATENT,
    LAYERS,
    MAMBA2,
    MAX_LEN,
    MULTI_HEAD,
    MULTIPLIERS,
    OPT,
    ROPE,
    SHORT_CONV,
    SMALL_EXPERTS,
    TIED,
    TOKENS,
    VOCAB,
    WIDE,
    WINDOWS,
    YARN,
    without,
)

DENSE = {
    "qwen2": lambda: hf.Qwen2Config(**GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**GROUPED, **HEAD),
    "llama": lambda: hf.LlamaConfig(**GROUPED),
    "mistral": lambda: hf.MistralConfig(**GROUPED, **HEAD, sliding_window=64),
    "phi3": lambda: hf.Phi3Config(**GROUPED),
    "ernie4_5": lambda: hf.Ernie4_5Config(**GROUPED, **HEAD),
    "seed_oss": lambda: hf.SeedOssConfig(
        **GROUPED, **HEAD, attention_dropout=0.0, residual_dropout=0.0
    ),
    "smollm3": lambda: hf.SmolLM3Config(**GROUPED, no_rope_layers=[1, 0, 1, 1]),
    "apertus": lambda: hf.ApertusConfig(**GROUPED, rope_parameters=ROPE),
    "nemotron": lambda: hf.NemotronConfig(**GROUPED, **HEAD),
    "starcoder2": lambda: hf.Starcoder2Config(**GROUPED),
    "stablelm": lambda: hf.StableLmConfig(**GROUPED),
    "granite": lambda: hf.GraniteConfig(**GROUPED, **MULTIPLIERS),
    "glm": lambda: hf.GlmConfig(**GROUPED, **HEAD),
    "glm4": lambda: hf.Glm4Config(**GROUPED, **HEAD),
    "olmo": lambda: hf.OlmoConfig(**GROUPED),
    "olmo2": lambda: hf.Olmo2Config(**MULTI_HEAD),
    "olmo3": lambda: hf.Olmo3Config(**MULTI_HEAD, **WIDE),
    "exaone4": lambda: hf.Exaone4Config(**GROUPED, **WIDE),
    "hyperclovax": lambda: hf.HyperCLOVAXConfig(
        **GROUPED, **HEAD, **MULTIPLIERS, use_post_norm=True
    ),
    "gemma": lambda: hf.GemmaConfig(**TIED, **HEAD),
    "gemma2": lambda: hf.Gemma2Config(**TIED, **HEAD, query_pre_attn_scalar=32, **WINDOWS),
    "gemma3": lambda: hf.Gemma3TextConfig(**TIED, **HEAD, query_pre_attn_scalar=32, **WINDOWS),
    "gemma4": lambda: hf.Gemma4TextConfig(
        **GEMMA4, global_head_dim=64, hidden_size_per_layer_input=0
    ),
    "gemma4_per_layer": lambda: hf.Gemma4TextConfig(
        **GEMMA4,
        global_head_dim=32,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=VOCAB,
    ),
    "minicpm3": lambda: hf.MiniCPM3Config(
        **MULTI_HEAD,
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
    "gpt2": lambda: hf.GPT2Config(**GPT2, n_positions=MAX_LEN, initializer_range=0.2),
    "gptj": lambda: hf.GPTJConfig(
        **GPT2, n_positions=MAX_LEN, rotary_dim=16, initializer_range=0.2
    ),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**MULTI_HEAD),
    "gpt_neox_sequential": lambda: hf.GPTNeoXConfig(**MULTI_HEAD, use_parallel_residual=False),
    "phi": lambda: hf.PhiConfig(**MULTI_HEAD),
    "cohere": lambda: hf.CohereConfig(**TIED),
    "cohere2": lambda: hf.Cohere2Config(**TIED, **HEAD, **WIDE),
    "falcon": lambda: hf.FalconConfig(**FALCON, num_kv_heads=2, new_decoder_architecture=True),
    "falcon_7b": lambda: hf.FalconConfig(**FALCON),
    "falcon_rw": lambda: hf.FalconConfig(
        **FALCON, parallel_attn=False, multi_query=False, alibi=True, bias=True
    ),
    "bloom": lambda: hf.BloomConfig(
        **TOKENS,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        n_layer=LAYERS,
        n_head=4,
        seq_length=MAX_LEN,
        initializer_range=0.2,
    ),
    "opt": lambda: hf.OPTConfig(**OPT),
    # Norms at the end of each block, none at the end of the model, a narrower head.
    # Weights wide enough that its tokens do not all come to look alike.
    "opt_350m": lambda: hf.OPTConfig(
        **OPT | {"init_std": 0.3}, word_embed_proj_dim=64, do_layer_norm_before=False
    ),
}

EXPERTS = {
    "mixtral": lambda: hf.MixtralConfig(**GROUPED, **FEW_EXPERTS),
    "phimoe": lambda: hf.PhimoeConfig(
        **GROUPED, **FEW_EXPERTS, attention_bias=True, lm_head_bias=True
    ),
    "granitemoe": lambda: hf.GraniteMoeConfig(**GROUPED, **FEW_EXPERTS, **MULTIPLIERS),
    "gpt_oss": lambda: hf.GptOssConfig(
        **GROUPED,
        **HEAD,
        **FEW_EXPERTS,
        sliding_window=64,
        rope_parameters=YARN,
    ),
    "olmoe": lambda: hf.OlmoeConfig(**MULTI_HEAD, num_experts=4, num_experts_per_tok=2),
    "granitemoeshared": lambda: hf.GraniteMoeSharedConfig(
        **GROUPED, **FEW_EXPERTS, **MULTIPLIERS, shared_intermediate_size=64
    ),
    # The second block is dense.
    "qwen2_moe": lambda: hf.Qwen2MoeConfig(
        **GROUPED, **SMALL_EXPERTS, shared_expert_intermediate_size=128, mlp_only_layers=[1]
    ),
    "qwen3_moe": lambda: hf.Qwen3MoeConfig(
        **GROUPED, **HEAD, **SMALL_EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "glm4_moe": lambda: hf.Glm4MoeConfig(
        **GROUPED,
        **HEAD,
        num_experts_per_tok=2,
        n_routed_experts=4,
        moe_intermediate_size=64,
        use_qk_norm=True,
        num_nextn_predict_layers=0,
    ),
    "deepseek_v2": lambda: hf.DeepseekV2Config(**LATENT, q_lora_rank=None, topk_method="greedy"),
    "deepseek_v3": lambda: hf.DeepseekV3Config(
        **LATENT,
        q_lora_rank=64,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        num_nextn_predict_layers=0,
    ),
}

HYBRIDS = {
    "mamba2": lambda: hf.Mamba2Config(
        **TOKENS,
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
        max_position_embeddings=MAX_LEN,
    ),
    # Blocks of one part each. Transformers clamps time steps at `time_step_min`, vLLM does not.
    "nemotron_h": lambda: hf.NemotronHConfig(
        **without(GROUPED, "num_hidden_layers", "initializer_range", "intermediate_size"),
        **HEAD,
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
        **GROUPED,
        **MAMBA2,
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
        **GROUPED,
        **MULTIPLIERS,
        **MAMBA2,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=HIDDEN,
    ),
    "granite_hybrid_moe": lambda: hf.GraniteMoeHybridConfig(
        **GROUPED,
        **MULTIPLIERS,
        **MAMBA2,
        **FEW_EXPERTS,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        shared_intermediate_size=HIDDEN,
    ),
    "lfm2": lambda: hf.Lfm2Config(**GROUPED, **SHORT_CONV, block_auto_adjust_ff_dim=False),
    # The first block is dense.
    "lfm2_moe": lambda: hf.Lfm2MoeConfig(
        **GROUPED, **SHORT_CONV, **SMALL_EXPERTS, num_dense_layers=1
    ),
}

FAMILIES = DENSE | EXPERTS | HYBRIDS

# Families that are not compared in float32, or not at all.
OTHERS = {
    # vLLM runs its linear attention in 16 bits only, where a router that had to choose between
    # experts would choose others.
    "qwen3_next": lambda: hf.Qwen3NextConfig(
        **GROUPED,
        **SMALL_EXPERTS | {"num_experts_per_tok": 4},
        shared_expert_intermediate_size=64,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        layer_types=["linear_attention", "full_attention"] * (LAYERS // 2),
    ),
    # Blocks pass on four streams at once.
    "gemma3n": lambda: hf.Gemma3nTextConfig(
        **TIED | WINDOWS | {"intermediate_size": [256] * LAYERS},
        **HEAD,
        hidden_size_per_layer_input=32,
        vocab_size_per_layer_input=VOCAB,
        laurel_rank=16,
        num_kv_shared_layers=0,
        activation_sparsity_pattern=[0.0] * LAYERS,
    ),
}

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

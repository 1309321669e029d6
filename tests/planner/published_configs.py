"""Small configs of every family that is planned from a config alone, by ``model_type``."""

from __future__ import annotations

from typing import Any

BASE: dict[str, Any] = {
    "torch_dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
MOE = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
SHARED = {"shared_expert_intermediate_size": 48, "decoder_sparse_step": 2, "mlp_only_layers": []}
LOCAL = {"num_local_experts": 8, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_key_value_heads": 4}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
SMALL: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral"},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "head_dim": 16},
    "qwen3": {"model_type": "qwen3"},
    "gemma3": {"model_type": "gemma3_text", "tie_word_embeddings": True},
    "mixtral": {"model_type": "mixtral", **LOCAL},
    "qwen2_moe": {"model_type": "qwen2_moe", "head_dim": 16, **MOE, **SHARED},
    "qwen3_moe": {"model_type": "qwen3_moe", **MOE, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
    "qwen3_next": {"model_type": "qwen3_next", "full_attention_interval": 2, **MOE, **SHARED, **LINEAR},
    "gpt_oss": {"model_type": "gpt_oss", **LOCAL},
    "deepseek_v3": {"model_type": "deepseek_v3", **ROUTED, **LATENT},
    "deepseek_v3 without q_lora": {"model_type": "deepseek_v3", **ROUTED, **LATENT, "q_lora_rank": None},
    "glm4_moe": {"model_type": "glm4_moe", **ROUTED, "attention_bias": True, "use_qk_norm": True},
    "minimax_m2": {"model_type": "minimax_m2", **LOCAL},
    "llama4": {"model_type": "llama4_text", **LOCAL, "intermediate_size_mlp": 80, "interleave_moe_layer_step": 2},
}
"""What each family says beside ``BASE``."""


def small(name: str, **changed: Any) -> dict[str, Any]:
    """The whole config of the family ``name``."""
    return {**BASE, **SMALL[name], **changed}

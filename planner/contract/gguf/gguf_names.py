"""From the names of a GGUF file's tensors to those of a Hugging Face checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

_OUTER: Mapping[str, str] = MappingProxyType({"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"})
_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_qkv": "self_attn.qkv_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "ffn_gate_inp": "mlp.gate",
        "ffn_gate_exps": "mlp.experts.*.gate_proj",
        "ffn_up_exps": "mlp.experts.*.up_proj",
        "ffn_down_exps": "mlp.experts.*.down_proj",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    }
)
"""As Llama, Mistral, Qwen and most others call them; ``*`` stands for an expert's number."""
_SANDWICH: Mapping[str, str] = MappingProxyType(
    {
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    }
)
_OTHERWISE: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "gemma2": _SANDWICH,
        "gemma3_text": _SANDWICH,
        "phi3": {"ffn_up": "mlp.gate_up_proj"},
        "starcoder2": {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        "mixtral": {
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.*.w1",
            "ffn_up_exps": "block_sparse_moe.experts.*.w3",
            "ffn_down_exps": "block_sparse_moe.experts.*.w2",
        },
    }
)
"""What a model_type calls otherwise."""
_RECOMPUTED = re.compile(r"(?:.*\.)?(?:rope_freqs|rope_factors_long|rope_factors_short)\.weight")
_NUMBERED = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")
_SINGLE = re.compile(r"([a-z_]+)\.(weight|bias)")


def is_told(name: str) -> bool:
    """Whether the tensor is a part of what the config says, so that no weight of the model is filled by it."""
    return _RECOMPUTED.fullmatch(name) is not None


def hf_name(name: str, model_type: str) -> str | None:
    """What a checkpoint of ``model_type`` calls the tensor ``name``; None for one that is not known."""
    numbered = _NUMBERED.fullmatch(name)
    if numbered is not None:
        layer, what, leaf = numbered.groups()
        found = {**_LAYER, **_OTHERWISE.get(model_type, {})}.get(what)
        return None if found is None else f"model.layers.{layer}.{found}.{leaf}"
    single = _SINGLE.fullmatch(name)
    outer = _OUTER.get(single[1]) if single is not None else None
    return None if outer is None or single is None else f"{outer}.{single[2]}"

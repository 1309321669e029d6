"""GGUF files of tiny checkpoints, written by the ``gguf`` package under the names of its own map."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

COMMITTED = Path(__file__).with_name("gguf")
"""Two layers of a trained Llama, cut to 256 columns and 512 tokens, as llama-quantize of llama.cpp makes them: a preset that mixes types,
and a file with a type for each kind of matrix."""
ARCHITECTURES = {
    "llama": "llama", "qwen2": "qwen2", "qwen2_moe": "qwen2moe", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "mixtral": "llama",
    "phi3": "phi3", "starcoder2": "starcoder2", "gemma2": "gemma2", "gemma3_text": "gemma3",
}  # fmt: skip
WIDE = {"hidden_size": 128, "intermediate_size": 160, "head_dim": 32}
"""Sizes that blocks of 32 divide."""
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.*)")


def as_gguf(checkpoint: Path, out: Path, kind: str, per_file: int = 0, apart: tuple[str, str] = ("", ""), **metadata: Any) -> Path:
    """The checkpoint in the directory ``checkpoint`` as the file ``out``, its matrices in ``kind``; in files of ``per_file`` tensors each.
    Names with ``apart[0]`` in them are of the kind ``apart[1]``. ``metadata``: numbers that are set or, None, left out."""
    config, tensors = json.loads((checkpoint / "config.json").read_text()), load_file(checkpoint / "model.safetensors")
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(out, architecture, split_max_tensors=per_file)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    said = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": kv_heads,
        "vocab_size": config["vocab_size"],
        "attention.sliding_window": config.get("sliding_window") if "gemma" in architecture else None,
        "expert_count": config.get("num_experts") or config.get("num_local_experts"),
        "expert_used_count": config.get("num_experts_per_tok"),
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }
    if architecture == "llama":
        said["rope.dimension_count"] = config["head_dim"]
    elif "head_dim" in config:
        said["attention.key_length"] = config["head_dim"]
    for key, value in (said | metadata).items():
        if value is not None:
            writer.add_uint32(f"{architecture}.{key}", value)
    if "norm_epsilon" in config:
        writer.add_float32(f"{architecture}.attention.layer_norm_epsilon", config["norm_epsilon"])
    else:
        writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    rope = config["rope_parameters"]
    writer.add_float32(f"{architecture}.rope.freq_base", rope.get("full_attention", rope)["rope_theta"])
    number = next(arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    for name, tensor in _stacked(tensors).items():
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        if architecture == "llama" and ".attn_q." in found:
            tensor = _in_turn(tensor, heads)
        if architecture == "llama" and ".attn_k." in found:
            tensor = _in_turn(tensor, kv_heads)
        if "gemma" in architecture and "norm" in name:
            tensor = tensor.float() + 1
        plain = tensor.dim() == 1 or "ffn_gate_inp" in found
        held, how = _held(tensor.float().numpy(), "F32" if plain else apart[1] if apart[0] and apart[0] in found else kind)
        writer.add_tensor(found, held, raw_dtype=how)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def _held(values: np.ndarray, kind: str) -> tuple[np.ndarray, gguf.GGMLQuantizationType]:
    how = gguf.GGMLQuantizationType[kind]
    return (values, how) if kind == "F32" else (gguf.quants.quantize(values, how), how)


def _stacked(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts one after the other, as such files hold them."""
    found: dict[str, Any] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: [int(p) if p.isdigit() else 0 for p in item[0].split(".")]):
        expert = _EXPERT.fullmatch(name)
        if expert is None:
            found[name] = tensor
        else:
            found.setdefault(f"{expert[1]}.{expert[3]}", []).append(tensor)
    return {name: torch.stack(one) if isinstance(one, list) else one for name, one in found.items()}


def _in_turn(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as convert_hf_to_gguf.py of llama.cpp permutes them."""
    rows, columns = matrix.shape
    return matrix.view(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)

"""From a GGUF file's metadata to the config.json that its model would have."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.common.outside.plain_files import open_plain
from penstock.planner.contract.gguf.gguf_header import GgufTensor
from penstock.planner.contract.gguf.gguf_types import PLAIN

Tensors = Mapping[str, GgufTensor]
Config = dict[str, Any]

_DTYPES: Mapping[str, str] = MappingProxyType({"F32": "float32", "F16": "float16", "BF16": "bfloat16"})
_TOKENS: Mapping[str, str] = MappingProxyType({"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"})
LLAMA3 = MappingProxyType({"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})
"""What all Llama 3.1 to 3.3 have; only the factor differs."""


class _Metadata:
    """The metadata, whose keys begin with the architecture's name."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.architecture = values.get("general.architecture")
        self.values, self.where = values, where

    def get(self, key: str) -> Any:
        return self.values.get(f"{self.architecture}.{key}")

    def __getitem__(self, key: str) -> Any:
        found = self.get(key)
        if found is None:
            raise UserError(
                f"{self.where}: the metadata lacks {self.architecture}.{key}; download the file again, or put config.json beside it"
            )
        return found

    def count(self, key: str) -> int:
        found = self[key]
        if type(found) is not int or not 0 < found < 2**31:
            raise UserError(
                f"{self.where}: {self.architecture}.{key} is {str(found)[:40]}, allowed is a whole number above 0; download the file again"
            )
        return found

    def number(self, key: str) -> float:
        found = self[key]
        if type(found) not in (int, float) or not math.isfinite(found):
            raise UserError(f"{self.where}: {self.architecture}.{key} is {str(found)[:40]}, allowed is a number; download the file again")
        # kept as F32: the decimals that a person wrote
        return float(f"{found:.7g}")


def head_counts(metadata: Mapping[str, Any], where: str) -> tuple[int, int]:
    """Of queries, and of keys and values."""
    m = _Metadata(metadata, where)
    heads = m.count("attention.head_count")
    return heads, m.count("attention.head_count_kv") if m.get("attention.head_count_kv") is not None else heads


def _common(m: _Metadata) -> Config:
    heads, kv_heads = head_counts(m.values, m.where)
    head_dim = m.get("attention.key_length") or m["embedding_length"] // heads
    return {
        "hidden_size": m.count("embedding_length"),
        "intermediate_size": m.count("feed_forward_length"),
        "num_hidden_layers": m.count("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": m.count("context_length"),
        "rope_theta": m.number("rope.freq_base") if m.get("rope.freq_base") is not None else 10000.0,
    }


def _rms(m: _Metadata, tensors: Tensors) -> Config:
    return _common(m) | {"rms_norm_eps": m.number("attention.layer_norm_rms_epsilon")}


def _llama(m: _Metadata, tensors: Tensors) -> Config:
    if m.get("expert_count"):
        raise UserError(
            f"{m.where}: a Llama with experts (Mixtral): no GGUF file has its whole config; put the model's config.json beside the file"
        )
    rotated = m.get("rope.dimension_count")
    config = _rms(m, tensors)
    biased = {"attention_bias": True} if "blk.0.attn_q.bias" in tensors else {}
    return config | ({"head_dim": rotated} if type(rotated) is int and rotated > 0 else {}) | biased


def _qwen2_moe(m: _Metadata, tensors: Tensors) -> Config:
    shared = (
        {"shared_expert_intermediate_size": m.count("expert_shared_feed_forward_length")}
        if _has(m, "expert_shared_feed_forward_length")
        else {}
    )
    return _experts(m, tensors) | shared


def _has(m: _Metadata, key: str) -> bool:
    return m.get(key) is not None


def _experts(m: _Metadata, tensors: Tensors) -> Config:
    width = {"moe_intermediate_size": m.count("expert_feed_forward_length")} if _has(m, "expert_feed_forward_length") else {}
    return _rms(m, tensors) | {"num_experts": m.count("expert_count"), "num_experts_per_tok": m.count("expert_used_count")} | width


def _qwen3_moe(m: _Metadata, tensors: Tensors) -> Config:
    return _experts(m, tensors) | {"norm_topk_prob": True}


def _gemma(m: _Metadata, tensors: Tensors) -> Config:
    """Softcaps and the activation are the same in all Gemma 2, and in all Gemma 3. The 27B of each scales queries by another width."""
    config = _rms(m, tensors)
    per_head = config["num_hidden_layers"] in (46, 62)
    width = config["hidden_size"] // config["num_attention_heads"] if per_head else config["head_dim"]
    return config | {"sliding_window": m.count("attention.sliding_window"), "query_pre_attn_scalar": width}


def _phi3(m: _Metadata, tensors: Tensors) -> Config:
    window = m.get("attention.sliding_window")
    config = _rms(m, tensors)
    del config["head_dim"]  # transformers' Phi3 derives it
    return config | ({"sliding_window": window} if type(window) is int and window > 0 else {})


def _starcoder2(m: _Metadata, tensors: Tensors) -> Config:
    config = _common(m)
    del config["head_dim"]
    return config | {"norm_epsilon": m.number("attention.layer_norm_epsilon")}


FAMILIES: Mapping[str, tuple[str, Callable[[_Metadata, Tensors], Config]]] = MappingProxyType(
    {
        "llama": ("llama", _llama),
        "qwen2": ("qwen2", _rms),
        "qwen3": ("qwen3", _rms),
        "qwen2moe": ("qwen2_moe", _qwen2_moe),
        "qwen3moe": ("qwen3_moe", _qwen3_moe),
        "gemma2": ("gemma2", _gemma),
        "gemma3": ("gemma3_text", _gemma),
        "phi3": ("phi3", _phi3),
        "starcoder2": ("starcoder2", _starcoder2),
    }
)
"""Architectures whose config the metadata says: its name there -> model_type, and what makes the config."""


def known_architecture(metadata: Mapping[str, Any], where: str) -> str:
    """UserError for one whose tensors are not known here: files of many hold them in another order, or changed."""
    architecture = str(metadata.get("general.architecture", ""))[:40]
    if architecture not in FAMILIES:
        raise UserError(
            f"{where}: GGUF files of {architecture!r} models are not read; read are {', '.join(FAMILIES)}, Mixtral with config.json "
            "beside it: use the model's safetensors"
        )
    return architecture


def derived_config(metadata: Mapping[str, Any], tensors: Tensors, where: str) -> Config:
    """What config.json would say. transformers' own reading of the file has the same values where it has them; this one also has a head's
    size, the experts' width and the scaling of rotary frequencies.

    UserError, one line, for an architecture that is not known, or sizes that are missing.
    """
    model_type, make = FAMILIES[known_architecture(metadata, where)]
    m = _Metadata(metadata, where)
    table = tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise UserError(f"{where}: token_embd.weight is missing; download the file again")
    tokens = {key: metadata.get(f"tokenizer.ggml.{name}_token_id") for name, key in _TOKENS.items()}
    return {
        "model_type": model_type,
        **make(m, tensors),
        **_scaled(m, tensors),
        "vocab_size": table.shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "dtype": computed_dtype(tensors),
        **{key: value if type(value) is int and 0 <= value < table.shape[0] else None for key, value in tokens.items()},
    }


def computed_dtype(tensors: Tensors) -> str:
    """What the model computes in: the type of most of the layers' bytes, BF16 where they are coded."""
    names = {block.name for block in PLAIN.values()}
    matrices = [tensor for name, tensor in tensors.items() if name.startswith("blk.") and len(tensor.shape) > 1]
    sizes = {name: sum(tensor.nbytes for tensor in matrices if tensor.block.name == name) for name in {t.block.name for t in matrices}}
    most = max(sizes, key=lambda name: sizes[name], default="BF16")
    return _DTYPES[most] if most in names else "bfloat16"


def _scaled(m: _Metadata, tensors: Tensors) -> Config:
    """How rotary frequencies are scaled, if they are."""
    if any(name.startswith("rope_factors_") or ".rope_factors_" in name for name in tensors):
        raise UserError(f"{m.where}: its rotary frequencies are scaled by tables; put the model's config.json beside the file")
    if "rope_freqs.weight" in tensors:
        return {"rope_scaling": _llama3(m, tensors["rope_freqs.weight"])}
    kind = m.get("rope.scaling.type")
    if kind in (None, "none"):
        return {}
    if kind not in ("linear", "yarn"):
        raise UserError(
            f"{m.where}: rope.scaling.type is {str(kind)[:40]!r}, known are none, linear and yarn; put config.json beside the file"
        )
    original = m.get("rope.scaling.original_context_length")
    length = {"original_max_position_embeddings": original} if type(original) is int and kind == "yarn" else {}
    return {"rope_scaling": {"rope_type": kind, "factor": m.number("rope.scaling.factor"), **length}}


def _llama3(m: _Metadata, tensor: GgufTensor) -> Config:
    """The scaling of Llama 3.1 and later, of which the file holds each frequency's divisor."""
    count = math.prod(tensor.shape)
    if tensor.block.name != "F32" or count > 4096:
        raise UserError(
            f"{m.where}: rope_freqs.weight is {tensor.block.name} of {count} elements, allowed is F32; put config.json beside the file"
        )
    with open_plain(tensor.file) as file:
        file.seek(tensor.offset)
        stored = struct.unpack(f"<{count}f", file.read(4 * count))
    theta = m.number("rope.freq_base") if _has(m, "rope.freq_base") else 10000.0
    factor = float(f"{max(stored):.5g}")
    if not all(abs(a - b) <= 1e-3 * abs(b) for a, b in zip(stored, _divisors(theta, 2 * count, factor), strict=True)):
        raise UserError(f"{m.where}: rope_freqs.weight holds a scaling that is not known; put the model's config.json beside the file")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}


def _divisors(theta: float, dimensions: int, factor: float) -> list[float]:
    """As transformers' ``_compute_llama3_parameters``: what each frequency is divided by."""
    low, high, length = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"], LLAMA3["original_max_position_embeddings"]
    found = []
    for i in range(0, dimensions, 2):
        wave = 2 * math.pi * theta ** (i / dimensions)
        smooth = (length / wave - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        found.append(1.0 if wave < length / high else factor if wave > length / low else between)
    return found

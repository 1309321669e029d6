"""The one place that knows Hugging Face's config.json: its keys, its nesting, its names for the same thing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.planner.common.errors import UserError

EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
LAYER_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN_KEYS = ("hidden_size", "n_embd", "d_model")
HEAD_KEYS = ("num_attention_heads", "n_head", "n_heads")
KV_HEAD_KEYS = ("num_key_value_heads", "num_kv_heads")
FFN_KEYS = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
EXPERT_FFN_KEYS = ("moe_intermediate_size", "expert_ffn_hidden_size")
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "moe_k", "top_k_experts")
DTYPE_KEYS = ("dtype", "torch_dtype")
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len")


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder's own part of a config: ``text_config`` laid over the top level of a multimodal one."""
    nested = config.get("text_config")
    if not isinstance(nested, dict):
        return dict(config)
    outer = {key: config[key] for key in ("quantization_config", "is_encoder_decoder", "architectures") if key in config}
    tied = {key: True for key in ("tie_word_embeddings",) if config.get(key) is True}
    dtypes = {key: config.get(key) for key in DTYPE_KEYS}
    return {**outer, **nested, **tied, **dtypes}


@dataclass(frozen=True)
class HfGeometry:
    """The sizes that config.json states. None is what it leaves to the model class's default."""

    where: str
    """What the config was read from, for messages."""
    model_type: str
    layers: int
    extra_layers: int
    """Layers after the decoder's own that only serve multi-token prediction."""
    hidden: int | None
    vocab: int | None
    attn_width: int | None
    kv_width: int | None
    ffn: int | None
    """Intermediate size of a dense FFN, the largest when layers differ."""
    experts: int
    top_k: int
    expert_ffn: int | None
    shared_ffn: int
    """Intermediate size of the experts that every token visits."""
    tied: bool | None
    dtype: str | None
    """What the model computes in, by torch's name."""
    compresses_kv: bool
    """Whether K and V are projected from one latent vector."""
    whole_experts: bool
    """Whether a layer's routed experts are computed as one: some of them are the identity and have no weights."""
    max_tokens: int = 0
    """Longest sequence that the model is made for; 0: it does not say."""


def geometry_from_config(config: Mapping[str, Any], where: str) -> HfGeometry:
    """Read ``config`` (already unwrapped by ``text_config``). Raises UserError for what Penstock does not run."""
    if config.get("is_encoder_decoder") is True:
        raise UserError(f"{where}: an encoder-decoder model is not supported; use a decoder-only one with self_attn and mlp blocks")
    listed: list[Any] = next((config[key] for key in ("layers_block_type", "layer_types") if isinstance(config.get(key), list)), [])
    layers = first_count(config, where, LAYER_KEYS) or len(listed)
    if not layers:
        raise UserError(f"{where}: num_hidden_layers is missing or 0, a decoder has at least 1; use a decoder-only Hugging Face checkpoint")
    _refuse_impossible(config, where)
    heads = first_count(config, where, HEAD_KEYS)
    kv_heads = _kv_heads(config, where) or heads
    hidden = first_count(config, where, HIDDEN_KEYS)
    head_dim = _count(config, where, "head_dim") or (hidden // heads if hidden and heads else None)
    attn_width = heads * head_dim if heads and head_dim else None
    kv_width = kv_heads * head_dim if kv_heads and head_dim else None
    if heads and _count(config, where, "kv_lora_rank"):
        qk_dim = (_count(config, where, "qk_nope_head_dim") or 0) + (_count(config, where, "qk_rope_head_dim") or 0)
        attn_width, kv_width = heads * qk_dim, heads * (qk_dim + (_count(config, where, "v_head_dim") or qk_dim)) // 2
    expert_ffn = first_count(config, where, EXPERT_FFN_KEYS)
    ffn = first_count(config, where, FFN_KEYS)
    shared = (_count(config, where, "n_shared_experts") or 0) * (expert_ffn or 0)
    tied = config.get("tie_word_embeddings")
    return HfGeometry(
        where=where,
        model_type=str(config.get("model_type", "")),
        layers=layers,
        extra_layers=_count(config, where, "num_nextn_predict_layers") or 0,
        hidden=hidden,
        vocab=_count(config, where, "vocab_size"),
        attn_width=attn_width,
        kv_width=kv_width,
        ffn=ffn,
        experts=first_count(config, where, EXPERT_COUNT_KEYS) or 0,
        top_k=first_count(config, where, TOP_K_KEYS) or 0,
        expert_ffn=expert_ffn or ffn,
        shared_ffn=_count(config, where, "shared_expert_intermediate_size") or shared,
        tied=tied if isinstance(tied, bool) else None,
        dtype=next((str(config[key]).removeprefix("torch.") for key in DTYPE_KEYS if config.get(key)), None),
        compresses_kv=bool(config.get("kv_lora_rank")),
        whole_experts=bool(config.get("zero_expert_num")),
        max_tokens=first_count(config, where, LENGTH_KEYS) or 0,
    )


def _refuse_impossible(config: Mapping[str, Any], where: str) -> None:
    """UserError for sizes of 0 and a padding token beyond the vocabulary, by which no model can be built."""
    for key in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads", "vocab_size"):
        if _count(config, where, key) == 0:
            raise UserError(f"{where}: {key} is 0, and must be 1 or more; restore the model's own config.json")
    pad, vocab = config.get("pad_token_id"), _count(config, where, "vocab_size")
    if pad is not None and vocab and (type(pad) is not int or not -vocab <= pad < vocab):
        raise UserError(
            f"{where}: pad_token_id is {str(pad)[:40]}, and the vocabulary has ids 0 to {vocab - 1}; restore the model's own config.json"
        )


def _kv_heads(config: Mapping[str, Any], where: str) -> int | None:
    """Heads of K and V. A Falcon of the old kind and a BigCode say by ``multi_query`` that there is one."""
    if config.get("multi_query") is True and config.get("new_decoder_architecture") is not True:
        return 1
    return first_count(config, where, KV_HEAD_KEYS)


def first_count(config: Mapping[str, Any], where: str, keys: tuple[str, ...]) -> int | None:
    """The count that the first of ``keys`` states; None where ``config`` has none of them."""
    return next((_count(config, where, key) for key in keys if config.get(key) is not None), None)


def _count(config: Mapping[str, Any], where: str, key: str) -> int | None:
    """``config[key]`` as a count; the largest of a list (one entry a layer); None when it is absent."""
    value = config.get(key)
    if value is None:
        return None
    counts: list[int] = value if isinstance(value, list) and value else [value]
    if not all(type(n) is int and 0 <= n < 2**40 for n in counts):
        raise UserError(
            f"{where}: {key} is {str(value)[:40]!r}, allowed is a whole number of 0 or more; restore the model's own config.json"
        )
    return max(counts)

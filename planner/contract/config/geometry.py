"""A model from its geometry alone: exact bytes of every unit by arithmetic, and the Hugging Face config of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.planner.common.errors import UserError, nearest
from penstock.planner.contract.config.config_schema import ModelConfig
from penstock.planner.contract.experts.expert_hits import default_hit_rates
from penstock.planner.contract.given.formats import plain_format
from penstock.planner.contract.given.model import ModelSpec, Routers
from penstock.planner.contract.given.unit_spec import UnitKind, UnitSpec


@dataclass(frozen=True)
class Family:
    """What a ``model_type`` fixes about its decoder layer, whatever the sizes."""

    architecture: str
    """The class that `transformers` builds."""
    qk_norm: bool = False
    """RMSNorm over head_dim on queries and keys."""
    qkv_bias: bool = False
    """Biases on the query, key and value projections."""
    experts: str = ""
    """config.json's key for the number of routed experts; empty for a dense FFN."""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family("LlamaForCausalLM"),
        "mistral": Family("MistralForCausalLM"),
        "mixtral": Family("MixtralForCausalLM", experts="num_local_experts"),
        "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True),
        "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
        "qwen3_moe": Family("Qwen3MoeForCausalLM", qk_norm=True, experts="num_experts"),
    }
)
"""The decoder families whose bytes are known by arithmetic; any other model is read from its checkpoint."""

ACTIVATION = "silu"
"""Of all their FFNs."""


def spec_from_geometry(cfg: ModelConfig) -> ModelSpec:
    """The spec of ``cfg``, stored and computed in ``cfg.dtype``. Elements of each part.

        attention       = hidden x head_dim x (2 heads + 2 kv_heads) [+ 2 head_dim norms] [+ biases]
        FFN             = 3 x hidden x ffn
        FFN of MoE      = experts x hidden (the router), and experts of 3 x hidden x expert_ffn
        norms           = 2 x hidden a layer + the final one
        embedding, head = vocab x hidden

    Hit rates are those of the known routings. Raises UserError naming the field that is missing or does not fit.
    """
    family = _checked_family(cfg)
    layers = _checked_layers(cfg)
    q, kv = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    attn = cfg.hidden * (2 * q + 2 * kv)
    attn += 2 * cfg.head_dim if family.qk_norm else 0
    attn += q + 2 * kv if family.qkv_bias else 0
    if family.experts:
        expert, ffn = 3 * cfg.hidden * cfg.expert_ffn, cfg.experts * cfg.hidden
        routers = Routers(cfg.top_k, default_hit_rates(cfg.experts, cfg.top_k))
    else:
        expert, ffn, routers = 0, 3 * cfg.hidden * cfg.ffn, None
    stored = plain_format(cfg.dtype)

    def unit(kind: UnitKind, layer: int | None, elements: int, count: int = 1) -> UnitSpec:
        return UnitSpec(kind, layer, stored.stored_bytes(1, elements), elements, stored, count)

    units = [unit(UnitKind.attn, i, attn) for i in range(layers)] + [unit(UnitKind.ffn, i, ffn) for i in range(layers)]
    units += [unit(UnitKind.expert, i, expert, cfg.experts) for i in range(layers) if expert]
    units += [unit(UnitKind.norm, None, (2 * layers + 1) * cfg.hidden), unit(UnitKind.embed, None, cfg.vocab * cfg.hidden)]
    units += [] if cfg.tied else [unit(UnitKind.head, None, cfg.vocab * cfg.hidden)]
    return ModelSpec(
        name=cfg.name,
        model_type=cfg.model_type,
        units=tuple(units),
        tied=cfg.tied,
        vocab=cfg.vocab,
        hidden=cfg.hidden,
        attn_width=q,
        kv_width=kv,
        ffn_width=cfg.top_k * cfg.expert_ffn if family.experts else cfg.ffn,
        compute_dtype=cfg.dtype,
        kv_dtype=cfg.dtype,
        routers=routers,
        max_tokens=cfg.max_positions,
        ffn_activation="" if family.experts else ACTIVATION,
    )


def hf_config_dict(cfg: ModelConfig) -> dict[str, Any]:
    """The config.json (transformers v5 style) of ``cfg``: what `AutoConfig` needs to build exactly this geometry.

    No stop token is named: a model of random weights has none to mean. Raises the same UserErrors as
    ``spec_from_geometry``.
    """
    family = _checked_family(cfg)
    rope: dict[str, Any] = {"rope_type": "default", **{str(k): v for k, v in cfg.rope_scaling.items()}, "rope_theta": cfg.rope_theta}
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": cfg.model_type,
        "dtype": cfg.dtype.value,
        "hidden_size": cfg.hidden,
        "num_hidden_layers": _checked_layers(cfg),
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.kv_heads,
        "head_dim": cfg.head_dim,
        "intermediate_size": cfg.ffn or cfg.expert_ffn,
        "hidden_act": ACTIVATION,
        "vocab_size": cfg.vocab,
        "max_position_embeddings": cfg.max_positions,
        "rms_norm_eps": cfg.norm_eps,
        "rope_parameters": rope,
        "tie_word_embeddings": cfg.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    if cfg.model_type == "mistral":
        config["sliding_window"] = None
    if family.experts:
        config |= {family.experts: cfg.experts, "num_experts_per_tok": cfg.top_k}
    if cfg.model_type == "qwen3_moe":
        config |= {"moe_intermediate_size": cfg.expert_ffn, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return config


def _checked_layers(cfg: ModelConfig) -> int:
    if cfg.layers is None or cfg.layers < 1:
        raise UserError(f"model.layers={cfg.layers}: a model has at least 1 layer; set model.layers")
    return cfg.layers


def _checked_family(cfg: ModelConfig) -> Family:
    """The family of ``cfg`` once every size is present and they fit one another."""
    if cfg.config:
        raise UserError(f"model={cfg.name}: known by its published config, of which only a plan is made; choose model=llama8b or the like")
    if not cfg.model_type and cfg.checkpoint:
        raise UserError(f"model.checkpoint={cfg.checkpoint}: has weights of its own; choose a geometry, such as model=llama8b")
    if not cfg.model_type:
        raise UserError(f"model.checkpoint: missing, model={cfg.name} is read from a checkpoint; set model.checkpoint=DIR")
    family = FAMILIES.get(cfg.model_type)
    if family is None:
        raise UserError(
            f"model.model_type={cfg.model_type!r}: allowed are {', '.join(FAMILIES)}{nearest(cfg.model_type, FAMILIES)}; "
            "other models: model=hf model.checkpoint=DIR"
        )
    needed = ("experts", "top_k", "expert_ffn") if family.experts else ("ffn",)
    for key in ("hidden", "heads", "kv_heads", "head_dim", "vocab", *needed):
        value = getattr(cfg, key)
        if value < 1:
            raise UserError(f"model.{key}={value}: must be at least 1 for a {cfg.model_type} model; set model.{key}")
    if not family.experts and (cfg.experts or cfg.top_k or cfg.expert_ffn):
        raise UserError(
            f"model.experts={cfg.experts}: a {cfg.model_type} model has no experts; set model.model_type to mixtral or qwen3_moe"
        )
    if cfg.heads % cfg.kv_heads:
        raise UserError(f"model.kv_heads={cfg.kv_heads}: must divide model.heads={cfg.heads}; change one of them")
    if cfg.model_type == "llama" and cfg.hidden % cfg.heads:  # LlamaConfig of transformers refuses it
        raise UserError(f"model.heads={cfg.heads}: must divide model.hidden={cfg.hidden} in a llama model; change one of them")
    if cfg.head_dim % 2:
        raise UserError(f"model.head_dim={cfg.head_dim}: must be even for rotary embeddings; change model.head_dim")
    if family.experts and cfg.top_k > cfg.experts:
        raise UserError(f"model.top_k={cfg.top_k}: at most model.experts={cfg.experts}; lower model.top_k")
    for key, fixed in (("qk_norm", family.qk_norm), ("qkv_bias", family.qkv_bias)):
        if getattr(cfg, key) != fixed:
            value = str(getattr(cfg, key)).lower()
            raise UserError(f"model.{key}={value}: a {cfg.model_type} model has {key} {str(fixed).lower()}; change model.{key}")
    return family

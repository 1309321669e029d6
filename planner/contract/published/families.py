"""The tensors of a model whose weights are not here, from its config alone, for the families whose layers are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from penstock.planner.contract.checkpoint.hf_config import EXPERT_COUNT_KEYS, first_count
from penstock.planner.contract.checkpoint.tally import TensorInfo
from penstock.planner.contract.given.formats import FORMATS, Dtype, plain_format

Named = Iterator[tuple[str, tuple[int, ...]]]
"""Tensors below one layer, with their shapes."""

STATED_F32 = ("mlp.gate.e_score_correction_bias",)
"""Tensors that transformers keeps in F32, whatever the rest is in."""


class _Unstated(Exception):
    """A size that the config leaves to the model class's default."""


class _Config:
    """config.json's sizes, each of which must be stated."""

    def __init__(self, values: Mapping[str, Any]):
        self._values = values

    def __getitem__(self, key: str) -> int:
        value = self._values.get(key)
        if type(value) is not int or value < 1:
            raise _Unstated(key)
        return value

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key)
        return default if value is None else value

    def says(self, key: str, default: bool = False) -> bool:
        return bool(self.get(key, default))

    @property
    def heads(self) -> tuple[int, int, int]:
        """Query heads, KV heads, elements of one head."""
        heads = self["num_attention_heads"]
        return heads, self.get("num_key_value_heads", heads), self.get("head_dim") or self["hidden_size"] // heads

    @property
    def experts(self) -> int:
        count = first_count(self._values, "config.json", EXPERT_COUNT_KEYS)
        if not count:
            raise _Unstated("num_experts")
        return count


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Named:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _attention(c: _Config, qkv_bias: bool = False, out_bias: bool = False, norms: str = "", gate: bool = False) -> Named:
    """Grouped-query attention; ``norms`` of queries and keys lie over a ``head`` or over the ``whole`` projection."""
    (heads, kv_heads, dim), hidden = c.heads, c["hidden_size"]
    yield from _linear("self_attn.q_proj", heads * dim * (2 if gate else 1), hidden, qkv_bias)
    for name in ("k_proj", "v_proj"):
        yield from _linear(f"self_attn.{name}", kv_heads * dim, hidden, qkv_bias)
    yield from _linear("self_attn.o_proj", hidden, heads * dim, out_bias)
    if norms:
        yield "self_attn.q_norm.weight", (dim if norms == "head" else heads * dim,)
        yield "self_attn.k_norm.weight", (dim if norms == "head" else kv_heads * dim,)


def _latent_attention(c: _Config) -> Named:
    """DeepSeek's multi-head latent attention."""
    heads, hidden, rank, rope = c["num_attention_heads"], c["hidden_size"], c["kv_lora_rank"], c["qk_rope_head_dim"]
    nope, value, bias = c["qk_nope_head_dim"], c["v_head_dim"], c.says("attention_bias")
    if c.get("q_lora_rank") is None:
        yield from _linear("self_attn.q_proj", heads * (nope + rope), hidden)
    else:
        yield from _linear("self_attn.q_a_proj", c["q_lora_rank"], hidden, bias)
        yield "self_attn.q_a_layernorm.weight", (c["q_lora_rank"],)
        yield from _linear("self_attn.q_b_proj", heads * (nope + rope), c["q_lora_rank"])
    yield from _linear("self_attn.kv_a_proj_with_mqa", rank + rope, hidden, bias)
    yield "self_attn.kv_a_layernorm.weight", (rank,)
    yield from _linear("self_attn.kv_b_proj", heads * (nope + value), rank)
    yield from _linear("self_attn.o_proj", hidden, heads * value, bias)


def _delta_net(c: _Config) -> Named:
    """The gated delta net of Qwen3-Next's linear layers."""
    hidden, value_heads = c["hidden_size"], c["linear_num_value_heads"]
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], value_heads * c["linear_value_head_dim"]
    yield from _linear("linear_attn.in_proj_qkvz", 2 * keys + 2 * values, hidden)
    yield from _linear("linear_attn.in_proj_ba", 2 * value_heads, hidden)
    yield "linear_attn.conv1d.weight", (2 * keys + values, 1, c["linear_conv_kernel_dim"])
    yield "linear_attn.dt_bias", (value_heads,)
    yield "linear_attn.A_log", (value_heads,)
    yield "linear_attn.norm.weight", (c["linear_value_head_dim"],)
    yield from _linear("linear_attn.out_proj", hidden, values)


def _mlp(c: _Config, width: int, name: str = "mlp", bias: bool = False) -> Named:
    for part in ("gate_proj", "up_proj"):
        yield from _linear(f"{name}.{part}", width, c["hidden_size"], bias)
    yield from _linear(f"{name}.down_proj", c["hidden_size"], width, bias)


def _experts(c: _Config, width: int, name: str = "mlp", router: str = "gate") -> Named:
    """All routed experts of a layer, one tensor for each projection, and their router."""
    count, hidden = c.experts, c["hidden_size"]
    yield f"{name}.{router}.weight", (count, hidden)
    for part in ("gate_proj", "up_proj"):
        yield f"{name}.experts.{part}", (count, width, hidden)
    yield f"{name}.experts.down_proj", (count, hidden, width)


def _llama(c: _Config, layer: int) -> Named:
    bias = c.says("attention_bias")
    yield from _attention(c, bias, bias)
    yield from _mlp(c, c["intermediate_size"], bias=c.says("mlp_bias"))


def _mistral(c: _Config, layer: int) -> Named:
    yield from _attention(c)
    yield from _mlp(c, c["intermediate_size"])


def _qwen2(c: _Config, layer: int) -> Named:
    yield from _attention(c, qkv_bias=True)
    yield from _mlp(c, c["intermediate_size"])


def _qwen3(c: _Config, layer: int) -> Named:
    bias = c.says("attention_bias")
    yield from _attention(c, bias, bias, norms="head")
    yield from _mlp(c, c["intermediate_size"])


def _gemma3(c: _Config, layer: int) -> Named:
    bias = c.says("attention_bias")
    c["head_dim"]
    yield from _attention(c, bias, bias, norms="head")
    yield from _mlp(c, c["intermediate_size"])
    for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
        yield f"{name}.weight", (c["hidden_size"],)


def _mixtral(c: _Config, layer: int) -> Named:
    yield from _attention(c)
    yield from _experts(c, c["intermediate_size"])


def _sparse(c: _Config, layer: int) -> bool:
    return layer not in c.get("mlp_only_layers", ()) and (layer + 1) % c.get("decoder_sparse_step", 1) == 0


def _shared_expert(c: _Config) -> Named:
    yield from _mlp(c, c["shared_expert_intermediate_size"], "mlp.shared_expert")
    yield "mlp.shared_expert_gate.weight", (1, c["hidden_size"])


def _qwen2_moe(c: _Config, layer: int) -> Named:
    yield from _attention(c, qkv_bias=c.says("qkv_bias", True))
    if _sparse(c, layer):
        yield from _experts(c, c["moe_intermediate_size"])
        yield from _shared_expert(c)
    else:
        yield from _mlp(c, c["intermediate_size"])


def _qwen3_moe(c: _Config, layer: int) -> Named:
    bias = c.says("attention_bias")
    yield from _attention(c, bias, bias, norms="head")
    if _sparse(c, layer):
        yield from _experts(c, c["moe_intermediate_size"])
    else:
        yield from _mlp(c, c["intermediate_size"])


def _qwen3_next(c: _Config, layer: int) -> Named:
    kinds, bias = c.get("layer_types"), c.says("attention_bias")
    if (layer + 1) % c["full_attention_interval"] if kinds is None else kinds[layer] == "linear_attention":
        yield from _delta_net(c)
    else:
        yield from _attention(c, bias, bias, norms="head", gate=True)
    if _sparse(c, layer):
        yield from _experts(c, c["moe_intermediate_size"])
        yield from _shared_expert(c)
    else:
        yield from _mlp(c, c["intermediate_size"])


def _gpt_oss(c: _Config, layer: int) -> Named:
    (heads, _, _), count, hidden, width = c.heads, c.experts, c["hidden_size"], c["intermediate_size"]
    bias = c.says("attention_bias", True)
    yield from _attention(c, bias, bias)
    yield "self_attn.sinks", (heads,)
    yield from _linear("mlp.router", count, hidden, bias=True)
    yield "mlp.experts.gate_up_proj", (count, 2 * width, hidden)
    yield "mlp.experts.gate_up_proj_bias", (count, 2 * width)
    yield "mlp.experts.down_proj", (count, hidden, width)
    yield "mlp.experts.down_proj_bias", (count, hidden)


def _shared_experts(c: _Config) -> Named:
    """DeepSeek's router of experts, with its correction, and those that every token visits."""
    width = c["moe_intermediate_size"]
    yield "mlp.gate.e_score_correction_bias", (c.experts,)
    yield from _experts(c, width)
    yield from _mlp(c, width * c["n_shared_experts"], "mlp.shared_experts")


def _deepseek_v3(c: _Config, layer: int) -> Named:
    yield from _latent_attention(c)
    yield from _shared_experts(c) if layer >= c.get("first_k_dense_replace", 0) else _mlp(c, c["intermediate_size"])


def _glm4_moe(c: _Config, layer: int) -> Named:
    yield from _attention(c, c.says("attention_bias"), norms="head" if c.says("use_qk_norm") else "")
    yield from _shared_experts(c) if layer >= c.get("first_k_dense_replace", 0) else _mlp(c, c["intermediate_size"])


def _minimax_m2(c: _Config, layer: int) -> Named:
    yield from _attention(c, norms="whole")
    yield "mlp.e_score_correction_bias", (c.experts,)
    yield from _experts(c, c["intermediate_size"])


def _llama4(c: _Config, layer: int) -> Named:
    bias, name = c.says("attention_bias"), "feed_forward"
    yield from _attention(c, bias, bias)
    sparse, step = c.get("moe_layers"), c.get("interleave_moe_layer_step", 1)
    if layer in sparse if sparse is not None else (layer + 1) % step == 0:
        yield from _experts(c, c["intermediate_size"], name, router="router")
        yield from _mlp(c, c["intermediate_size"], f"{name}.shared_expert")
    else:
        yield from _mlp(c, c["intermediate_size_mlp"], name)


KNOWN: Mapping[str, Callable[[_Config, int], Named]] = MappingProxyType(
    {
        "llama": _llama,
        "mistral": _mistral,
        "qwen2": _qwen2,
        "qwen3": _qwen3,
        "gemma3_text": _gemma3,
        "mixtral": _mixtral,
        "qwen2_moe": _qwen2_moe,
        "qwen3_moe": _qwen3_moe,
        "qwen3_next": _qwen3_next,
        "gpt_oss": _gpt_oss,
        "deepseek_v3": _deepseek_v3,
        "kimi_k2": _deepseek_v3,
        "glm4_moe": _glm4_moe,
        "minimax_m2": _minimax_m2,
        "llama4_text": _llama4,
    }
)
"""``model_type`` -> the tensors of layer n but for the two norms that every layer has."""

TIED_BY_DEFAULT = ("gemma3_text",)


def formula_tensors(config: Mapping[str, Any], layers: int) -> Mapping[str, TensorInfo] | None:
    """Every tensor of the decoder that ``config`` (unwrapped by ``text_config``) describes, unquantised, experts of a layer together.

    None where the family is unknown, or where the config leaves a size to the model class: then transformers must say.
    """
    below = KNOWN.get(str(config.get("model_type")))
    dtype = stated_dtype(config)
    if below is None or dtype is None:
        return None
    c = _Config(config)
    try:
        hidden = c["hidden_size"]
        shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,)}
        if not c.says("tie_word_embeddings", config["model_type"] in TIED_BY_DEFAULT):
            shapes["lm_head.weight"] = (c["vocab_size"], hidden)
        for layer in range(layers):
            shapes |= {f"model.layers.{layer}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in below(c, layer)}
    except _Unstated:
        return None
    plain, wide = plain_format(dtype), FORMATS["F32"]
    return {name: TensorInfo.of(shape, wide if name.endswith(STATED_F32) else plain) for name, shape in shapes.items()}


def stated_dtype(config: Mapping[str, Any]) -> Dtype | None:
    """What ``config`` says its weights are in."""
    stated = config.get("dtype") or config.get("torch_dtype")
    return Dtype(stated) if stated in list(Dtype) else None

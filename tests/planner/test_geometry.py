"""A model's bytes by arithmetic are those of the model that transformers builds."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.tensor_names import classify
from penstock.planner.contract.config.config_schema import ModelConfig
from penstock.planner.contract.config.geometry import hf_config_dict, spec_from_geometry
from penstock.planner.contract.experts.expert_hits import default_hit_rates
from penstock.planner.contract.given.formats import Dtype
from penstock.planner.contract.given.model import Experts, ModelSpec

LLAMA = ModelConfig(name="x", model_type="llama", layers=3, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab=100)
MIXTRAL = dataclasses.replace(LLAMA, model_type="mixtral", ffn=0, experts=4, top_k=2, expert_ffn=48)
SMALL = {
    "llama": LLAMA,
    "llama tied": dataclasses.replace(LLAMA, tied=True),
    "llama float32": dataclasses.replace(LLAMA, dtype=Dtype.float32),
    "llama wide heads": dataclasses.replace(LLAMA, head_dim=32),
    "mistral": dataclasses.replace(LLAMA, model_type="mistral"),
    "qwen2": dataclasses.replace(LLAMA, model_type="qwen2", qkv_bias=True),
    "qwen3": dataclasses.replace(LLAMA, model_type="qwen3", qk_norm=True),
    "mixtral": MIXTRAL,
    "qwen3_moe": dataclasses.replace(MIXTRAL, model_type="qwen3_moe", qk_norm=True),
}


def meta_bytes(cfg: ModelConfig) -> Counter[tuple[str, int | None]]:
    """Bytes by (kind, layer) of the model that transformers builds on the meta device; nothing is allocated."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = hf_config_dict(cfg)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=getattr(torch, config["dtype"]))
    found: Counter[tuple[str, int | None]] = Counter()
    for name, parameter in model.named_parameters():
        role = classify(name)
        found[role.kind, None if role.kind == "norm" else role.layer] += parameter.numel() * parameter.element_size()
    return found


def spec_bytes(spec: ModelSpec) -> Counter[tuple[str, int | None]]:
    """The same bytes as the planner sees them."""
    found: Counter[tuple[str, int | None]] = Counter({("norm", None): spec.norm_bytes, ("embed", None): spec.embed_bytes})
    if not spec.tied:
        found["head", None] = spec.head_bytes
    for layer in range(spec.layers):
        found["attn", layer], found["ffn", layer] = spec.attn_bytes[layer], spec.ffn_bytes[layer]
    if spec.experts:
        found.update({("ffn", layer): spec.experts.count * spec.experts.expert_bytes for layer in spec.experts.layers})
    return found


@pytest.mark.parametrize("name", SMALL)
def test_every_unit_has_the_bytes_that_transformers_gives_it(name):
    assert spec_bytes(spec_from_geometry(SMALL[name])) == meta_bytes(SMALL[name])


def test_a_llama_layer_is_computed_as_on_paper():
    spec = spec_from_geometry(LLAMA)
    assert spec.attn_bytes == (2 * (64 * 64 * 2 + 64 * 32 * 2),) * 3
    assert spec.ffn_bytes == (2 * 3 * 64 * 96,) * 3
    assert (spec.attn_width, spec.kv_width, spec.ffn_width) == (64, 32, 96)
    assert spec.checkpoint is None and spec.digest is None


def test_a_tied_model_counts_its_table_once():
    spec = spec_from_geometry(SMALL["llama tied"])
    assert (spec.head_bytes, spec.lm_head_bytes) == (0, spec.embed_bytes)


def test_experts_are_sized_one_by_one():
    spec = spec_from_geometry(MIXTRAL)
    assert spec.experts == Experts(4, 2, 3 * 64 * 48 * 2, (0, 1, 2), default_hit_rates(4, 2))
    assert spec.ffn_bytes == (4 * 64 * 2,) * 3, "the router"
    assert spec.ffn_width == 2 * 48


def test_layers_shorten_a_model_and_nothing_else():
    long, short = spec_from_geometry(LLAMA), spec_from_geometry(dataclasses.replace(LLAMA, layers=1))
    assert short.attn_bytes == long.attn_bytes[:1] and short.embed_bytes == long.embed_bytes
    assert long.norm_bytes - short.norm_bytes == 2 * 2 * 64 * 2


def test_the_rope_of_the_original_reaches_the_config():
    scaled = dataclasses.replace(LLAMA, rope_theta=5e5, rope_scaling={"rope_type": "llama3", "factor": 8.0})
    assert hf_config_dict(scaled)["rope_parameters"] == {"rope_type": "llama3", "factor": 8.0, "rope_theta": 5e5}
    assert hf_config_dict(LLAMA)["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "change, says",
    [
        ({"model_type": "lama"}, r"model\.model_type='lama'.*did you mean llama"),
        ({"model_type": "gemma3"}, r"model\.model_type='gemma3': allowed are llama.*model=hf model\.checkpoint=DIR"),
        ({"model_type": ""}, r"set model\.checkpoint=DIR"),
        ({"layers": 0}, r"model\.layers=0"),
        ({"layers": None}, r"model\.layers=None"),
        ({"hidden": 0}, r"model\.hidden=0"),
        ({"ffn": -1}, r"model\.ffn=-1"),
        ({"vocab": 0}, r"model\.vocab=0"),
        ({"kv_heads": 3}, r"model\.kv_heads=3: must divide model\.heads=4"),
        ({"kv_heads": 8}, r"model\.kv_heads=8: must divide"),
        ({"head_dim": 15}, r"model\.head_dim=15: must be even"),
        ({"experts": 8}, r"a llama model has no experts"),
        ({"qk_norm": True}, r"model\.qk_norm=true: a llama model has qk_norm false"),
        ({"model_type": "qwen2"}, r"model\.qkv_bias=false: a qwen2 model has qkv_bias true"),
        ({"model_type": "mixtral"}, r"model\.experts=0"),
    ],
)
def test_a_geometry_that_cannot_be_is_refused_naming_the_field(change, says):
    for use in (spec_from_geometry, hf_config_dict):
        with pytest.raises(UserError, match=says) as error:
            use(dataclasses.replace(LLAMA, **change))
        assert "\n" not in str(error.value)


def test_more_experts_per_token_than_experts_are_refused():
    with pytest.raises(UserError, match=r"model\.top_k=5: at most model\.experts=4"):
        spec_from_geometry(dataclasses.replace(MIXTRAL, top_k=5))

"""Every parameter is made of the right pieces of the right checkpoint tensors, and nothing is guessed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.planner.common.errors import UserError
from penstock.runtime.reading.layout import Piece
from penstock.runtime.store import tensor_parts as names
from penstock.runtime.store.tensor_parts import pieces_of

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Entry:
    shape: tuple[int, ...]
    nbytes: int


def skeleton(model_type: str, **sizes: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **SIZES, **sizes), dtype=torch.bfloat16)


def entry(*shape: int) -> Entry:
    return Entry(shape, torch.Size(shape).numel() * 2)


def test_experts_are_stacked_by_number_with_gate_before_up() -> None:
    model = skeleton("qwen3_moe", num_experts=12, num_experts_per_tok=2, moe_intermediate_size=8)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    stem = "model.layers.0.mlp.experts"
    tensors = {f"{stem}.{e}.{p}_proj.weight": entry(8, 32) for e in range(12) for p in ("up", "gate")}
    tensors |= {f"{stem}.{e}.down_proj.weight": entry(32, 8) for e in range(12)}
    found = pieces_of(model, shapes, tensors)
    assert found[f"{stem}.gate_up_proj"] == tuple(
        Piece(f"{stem}.{e}.{p}_proj.weight", 0, 512, e * 1024 + i * 512) for e in range(12) for i, p in enumerate(("gate", "up"))
    )
    assert found[f"{stem}.down_proj"] == tuple(Piece(f"{stem}.{e}.down_proj.weight", 0, 512, e * 512) for e in range(12))


def test_mixtral_names_become_those_of_the_module() -> None:
    model = skeleton("mixtral", num_local_experts=2, num_experts_per_tok=1)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    stem = "model.layers.0.block_sparse_moe"
    shape_of = {"w1": (48, 32), "w2": (32, 48), "w3": (48, 32)}
    tensors = {f"{stem}.experts.{e}.{w}.weight": entry(*shape) for e in range(2) for w, shape in shape_of.items()}
    tensors[f"{stem}.gate.weight"] = entry(2, 32)
    found = pieces_of(model, shapes, tensors)
    gate_up = found["model.layers.0.mlp.experts.gate_up_proj"]
    assert [piece.tensor for piece in gate_up] == [f"{stem}.experts.{e}.{w}.weight" for e in range(2) for w in ("w1", "w3")]
    assert found["model.layers.0.mlp.gate.weight"] == (Piece(f"{stem}.gate.weight", 0, 128, 0),)


def test_a_missing_expert_does_not_pass_for_a_smaller_layer() -> None:
    model = skeleton("mixtral", num_local_experts=2, num_experts_per_tok=1)
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    with pytest.raises(UserError, match=r"has shape \[1, 32, 48\] for parameter .*down_proj of shape \[2, 32, 48\]"):
        pieces_of(model, shapes, {"model.layers.0.block_sparse_moe.experts.0.w2.weight": entry(32, 48)})


def test_a_base_model_prefix_is_added_or_removed() -> None:
    model = skeleton("llama")
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    found = pieces_of(model, shapes, {"norm.weight": entry(32), "layers.0.self_attn.q_proj.weight": entry(32, 32)})
    assert set(found) == {"model.norm.weight", "model.layers.0.self_attn.q_proj.weight"}


def test_tensors_that_no_parameter_wants_are_left_alone() -> None:
    model = skeleton("llama")
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    assert pieces_of(model, shapes, {"model.layers.0.self_attn.rotary_emb.inv_freq": entry(8), "visual.patch.weight": entry(3)}) == {}


class Rewrite:
    """A converter as transformers has them: one source pattern, its targets, its operations."""

    def __init__(self, source: str, targets: list[str], operations: list[Any]):
        self.source_patterns, self.target_patterns, self.operations = [source], targets, operations

    def rename_source_key(self, key: str) -> tuple[str, str | None]:
        source = self.source_patterns[0]
        return (key.replace(source, self.target_patterns[0]), source) if source in key else (key, None)


class Chunk:
    dim = 0


class Transpose:
    dim = 0

    def __repr__(self) -> str:
        return "Transpose(0, 1)"


def test_one_tensor_may_fill_several_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    converter = Rewrite("qkv", ["q", "k", "v"], [Chunk()])
    monkeypatch.setattr(names, "_transforms", lambda model: ([], [converter]))
    found = pieces_of(torch.nn.Module(), {"a.q": (2, 5), "a.k": (2, 5), "a.v": (2, 5)}, {"a.qkv": entry(6, 5)})
    assert found == {"a.q": (Piece("a.qkv", 0, 20, 0),), "a.k": (Piece("a.qkv", 20, 20, 0),), "a.v": (Piece("a.qkv", 40, 20, 0),)}


def test_a_conversion_that_moves_single_elements_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = skeleton("llama")
    converter = Rewrite("wq", ["q_proj"], [Transpose()])
    monkeypatch.setattr(names, "_transforms", lambda model: ([], [converter]))
    with pytest.raises(UserError, match=r"model type llama: parameter .*\.self_attn\.q_proj\.weight needs .* Transpose\(0, 1\)"):
        pieces_of(model, {"model.layers.0.self_attn.q_proj.weight": (32, 32)}, {"model.layers.0.self_attn.wq.weight": entry(32, 32)})

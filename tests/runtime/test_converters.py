"""A model is changed by a list of converters, and its decoder is found by one rule."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.engine.converters import converters
from penstock.runtime.experts.expert_forward import LayerExperts, layer_experts
from penstock.runtime.model.head import BlockedHead, HeadInBlocks
from penstock.runtime.model.skeleton import build_skeleton, open_skeleton
from penstock.runtime.store.decoder import decoder_layers, module_name
from tests.cli import ROOT
from tests.support import decisions, plan_for, save_tiny

CPU = torch.device("cpu")


class Renamed:
    """Says in what order it came."""

    def __init__(self, name: str, said: list[str]):
        self._name, self._said = name, said

    def convert(self, model: nn.Module) -> None:
        assert all(parameter.is_meta for parameter in model.parameters())
        self._said.append(self._name)


def test_converters_apply_in_turn_before_any_weight_is_there(checkpoint: Path) -> None:
    said: list[str] = []
    build_skeleton(checkpoint, [Renamed("first", said), Renamed("second", said)])
    assert said == ["first", "second"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_in_blocks_declares_what_the_checkpoint_holds(tmp_path: Path, tied: bool) -> None:
    directory = save_tiny(tmp_path / "tiny", tied=tied)
    plain, blocked = open_skeleton(directory), open_skeleton(directory, [HeadInBlocks(300, 2)])
    assert isinstance(blocked.model.get_output_embeddings(), BlockedHead)
    assert blocked.store.others() == plain.store.others()
    assert ("lm_head.weight" in plain.store.others()) != tied


@pytest.mark.parametrize("gpu", [False, True])
def test_an_engine_changes_experts_always_and_the_head_where_it_may_stream(tmp_path: Path, gpu: bool) -> None:
    directory = save_tiny(tmp_path / "tiny", "mixtral", layers=3)
    plan = plan_for(directory, decisions(gpu=gpu), gpu=gpu)
    model = build_skeleton(directory, converters(plan))
    assert [type(runner) for runner in layer_experts(decoder_layers(model))] == [LayerExperts] * 3
    assert isinstance(model.get_output_embeddings(), BlockedHead) == gpu


def test_nothing_but_a_converter_replaces_what_a_model_computes_with() -> None:
    replacing = {"set_output_embeddings", "set_input_embeddings", "set_attn_implementation", "_experts_implementation"}
    found = {}
    for path in (ROOT / "runtime").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        dropped = {t for node in ast.walk(tree) if isinstance(node, ast.Assign) and ast.unparse(node.value) == "None" for t in node.targets}
        if replacing & {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node not in dropped}:
            found[path.name] = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert found and {name for name, functions in found.items() if "convert" not in functions} == set()


def test_a_tower_that_is_longer_than_the_decoder_is_not_taken_for_it() -> None:
    text = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    tower = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 5,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text |= {"num_key_value_heads": 1, "head_dim": 16}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=tower)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and all(hasattr(x, "self_attn") and hasattr(x, "mlp") for x in m)]
    assert sorted(map(len, lists)) == [2, 5]
    assert len(decoder_layers(model)) == 2 and "language_model" in module_name(model, decoder_layers(model))


def test_a_model_without_such_layers_is_refused() -> None:
    with pytest.raises(UserError, match="Linear: no list of decoder layers in it"):
        decoder_layers(nn.Linear(2, 2))


def test_the_store_and_the_model_agree_on_a_units_parameters(checkpoint: Path) -> None:
    skeleton = open_skeleton(checkpoint)
    names = {f"self_attn.{name}" for name, _ in skeleton.layers[1].self_attn.named_parameters()}
    assert {tensor.name for tensor in skeleton.store.unit(Unit("attn", 1)).tensors} == names

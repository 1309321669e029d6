"""The exported device_map, loaded by accelerate itself: the model computes what it computed before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.planner.contract.decided.decisions import ExpertSlots
from penstock.planner.export.exported import Request
from penstock.planner.export.targets import find_target
from tests.support import decisions, plan_for, save_tiny

accelerate = pytest.importorskip("accelerate")


def exported(checkpoint: Path, gpu: bool = True, **made: Any) -> dict[str, Any]:
    plan = plan_for(checkpoint, decisions(gpu=gpu, **made), gpu=gpu)
    return json.loads(find_target("accelerate").export(Request(plan, "plan.yaml")).text)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(12).reshape(1, 12) % 300).logits


def whole(checkpoint: Path) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)


def test_transformers_loads_a_plan_without_a_gpu_as_it_is(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    checkpoint = save_tiny(tmp_path / "model", layers=8)
    document = exported(checkpoint, gpu=False)
    assert {"cpu", "disk"} == set(document["device_map"].values())
    loaded = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.bfloat16, device_map=document["device_map"], offload_folder=tmp_path / "offload"
    )
    assert torch.equal(logits(loaded), logits(whole(checkpoint)))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mixtral"])
@pytest.mark.parametrize("tied", [False, True])
def test_accelerate_dispatches_a_plan_with_split_layers(model_type: str, tied: bool, tmp_path: Path) -> None:
    """A card is played by the CPU and its DRAM by the disk, which accelerate loads from before each module computes."""
    if model_type == "mixtral" and tied:
        pytest.skip("no tied Mixtral")
    checkpoint = save_tiny(tmp_path / "model", model_type, tied, layers=8)
    slots = ExpertSlots(9, 16, chunk_bytes=1 << 16) if model_type == "mixtral" else None
    mapped = exported(checkpoint, resident=(4, 2, 0), experts=slots)["device_map"]
    assert {0, "cpu"} <= set(mapped.values())
    played = {name: "cpu" if device == 0 else "disk" for name, device in mapped.items()}
    model = whole(checkpoint)
    before = logits(model)
    accelerate.utils.modeling.check_device_map(model, played)
    model = accelerate.dispatch_model(model, played, main_device="cpu", offload_dir=tmp_path / "offload", force_hooks=True)
    held = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.device.type == "meta"}
    split = [name for name, device in mapped.items() if name.endswith((".self_attn", ".mlp")) and device != 0]
    assert split and all(any(name.startswith(part) for name in held) for part in split)
    assert torch.equal(logits(model), before)


def test_max_memory_adds_up_to_the_model_and_is_what_accelerate_takes(tmp_path: Path) -> None:
    checkpoint = save_tiny(tmp_path / "model", layers=8)
    document = exported(checkpoint, resident=(4, 2, 0))
    limits = {int(k) if k.isdigit() else k: v for k, v in document["max_memory"].items()}
    assert set(limits) == {0, "cpu"} and all(n > 0 for n in limits.values())
    model = whole(checkpoint)
    inferred = accelerate.infer_auto_device_map(model, max_memory=limits, no_split_module_classes=["LlamaDecoderLayer"])
    assert set(inferred.values()) <= {0, "cpu", "disk"} and 0 in inferred.values()

"""What is no safetensors checkpoint is told what it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.checkpoint.known_types import known_types
from tests.support import save_tiny


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as refused:
        spec_from_checkpoint(path)
    assert "\n" not in str(refused.value)
    return str(refused.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth"])
def test_pickled_weights_are_told_how_to_convert(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_bytes(b"")
    assert f"holds {name}, pickled weights" in refusal(tmp_path) and f"{tmp_path} {tmp_path}-safetensors" in refusal(tmp_path)
    assert "name the directory" in refusal(tmp_path / name)


@pytest.mark.parametrize(("config", "base"), [({"base_model_name_or_path": "org/Base-8B"}, "org/Base-8B"), ([], "its base model")])
def test_an_adapter_is_told_from_a_model(tmp_path: Path, config: object, base: str) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    assert f"this is a LoRA adapter of {base}" in refusal(tmp_path) and f"adapter={tmp_path}" in refusal(tmp_path)


@pytest.mark.parametrize("more", [{}, {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}])
def test_a_model_that_transformers_has_no_code_for_is_refused_before_a_plan(tmp_path: Path, more: dict) -> None:
    directory = save_tiny(tmp_path / "model", layers=2)
    config = json.loads((directory / "config.json").read_text())
    assert {config["model_type"], "qwen3_vl_moe", "gemma3"} <= known_types()
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "own"} | more))
    code = "; code beside a checkpoint is never run" if more else ""
    with pytest.raises(UserError, match=rf"has no text model of model_type 'own'{code}; update transformers"):
        spec_from_checkpoint(directory)

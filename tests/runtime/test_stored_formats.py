"""A checkpoint of any format streams to the logits of the unstreamed model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.planner.contract.given.formats import FORMATS
from penstock.runtime.asked.run_schema import Validation
from tests.runtime.running import desk
from tests.support import decisions, plan_for, save_tiny


def stored_as(directory: Path, dtype: str) -> Path:
    """``directory`` with all weights in ``dtype``, as config.json then says."""
    path, config = directory / "model.safetensors", directory / "config.json"
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": dtype}))
    return directory


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_streams_to_the_unstreamed_logits(tmp_path: Path, name: str, model_type: str) -> None:
    directory = stored_as(save_tiny(tmp_path / "tiny", model_type, layers=6), FORMATS[name].plain)
    plan = plan_for(directory, decisions())
    assert plan.model.kv_dtype is FORMATS[name].plain
    report = desk(tmp_path, plan).run(max_new_tokens=4, validate=Validation.full)
    assert report["logits"]["relative_l2"] <= (1e-5 if name == "F32" else 0.0)

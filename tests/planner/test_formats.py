"""A unit's stored bytes, elements and format are the file's; what is computed in follows from most of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.checkpoint.safetensors_header import DTYPE_BITS, read_header
from penstock.planner.contract.given.formats import FORMATS, Dtype, plain_format
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.plan.model_section import model_from, model_mapping
from penstock.runtime.model.skeleton import open_skeleton
from tests.support import save_tiny

WEIGHTS = "model.safetensors"
PARTS = {
    ".experts.": UnitKind.expert,
    ".self_attn.": UnitKind.attn,
    ".mlp.": UnitKind.ffn,
    ".block_sparse_moe.": UnitKind.ffn,
    "embed_tokens": UnitKind.embed,
    "lm_head": UnitKind.head,
    "": UnitKind.norm,
}
"""Part of a tensor's name -> what it is for; the first that fits."""


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(7, 33), (1, 5), (64, 64)])
def test_a_formats_stored_bytes_are_those_of_a_safetensors_file(tmp_path: Path, name: str, shape: tuple[int, int]) -> None:
    save_file({"w": torch.zeros(shape, dtype=getattr(torch, FORMATS[name].plain))}, tmp_path / WEIGHTS)
    entry = read_header(tmp_path / WEIGHTS)["w"]
    assert (entry.dtype, entry.nbytes) == (name, FORMATS[name].stored_bytes(*shape))
    assert FORMATS[name].element_bits == DTYPE_BITS[name] and not FORMATS[name].needs_scratch


@pytest.mark.parametrize("dtype", Dtype)
def test_every_dtype_has_a_format_that_stores_it_as_it_is_and_torch_knows_it(dtype: Dtype) -> None:
    assert plain_format(dtype).plain is dtype
    assert getattr(torch, dtype).itemsize == dtype.nbytes


def rewrite(directory: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Path:
    """``directory`` with each tensor as ``change`` of its name and itself gives it."""
    tensors = {name: change(name, tensor).contiguous() for name, tensor in load_file(directory / WEIGHTS).items()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    return directory


def parameters_by_kind(directory: Path) -> dict[UnitKind, int]:
    """Elements of all units, counted by transformers' own names."""
    found = dict.fromkeys(UnitKind, 0)
    for name, tensor in load_file(directory / WEIGHTS).items():
        found[next(kind for part, kind in PARTS.items() if part in name)] += tensor.numel()
    return found


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mixtral"])
def test_elements_are_those_of_the_tensors(tmp_path: Path, model_type: str) -> None:
    directory = save_tiny(tmp_path / "tiny", model_type, layers=2)
    spec = spec_from_checkpoint(directory)
    counted = {kind: sum(unit.count * unit.elements for unit in spec.of_kind(kind)) for kind in UnitKind}
    assert counted == parameters_by_kind(directory)
    assert all(unit.stored_bytes == unit.format.stored_bytes(1, unit.elements) for unit in spec.units)


@pytest.mark.parametrize("dtype", Dtype)
def test_a_checkpoint_of_one_dtype_is_computed_and_keeps_its_kv_in_it(tmp_path: Path, dtype: Dtype) -> None:
    directory = rewrite(save_tiny(tmp_path / "tiny", layers=2), lambda _, tensor: tensor.to(getattr(torch, dtype)))
    say_dtype(directory, str(dtype))
    spec = spec_from_checkpoint(directory)
    assert (spec.compute_dtype, spec.kv_dtype) == (dtype, dtype)
    assert {unit.format for unit in spec.units} == {plain_format(dtype)}
    assert spec.kv_bytes_per_token == 2 * 2 * 16 * dtype.nbytes * 2, "K and V, 2 heads of 16, 2 layers"
    assert model_from(model_mapping(spec)) == spec


def test_wider_norms_are_resident_as_they_are_stored(tmp_path: Path) -> None:
    """What is stored in another format than its unit is counted as stored and never moves."""
    plain = spec_from_checkpoint(save_tiny(tmp_path / "plain", "qwen3", layers=2))
    wide = rewrite(save_tiny(tmp_path / "wide", "qwen3", layers=2), lambda name, t: t.float() if "norm" in name else t)
    mixed = spec_from_checkpoint(wide)
    inner = 2 * 16 * 2
    assert mixed.attn_bytes[0] == plain.attn_bytes[0] - inner, "norms of queries and keys are resident, as all that is cast"
    assert mixed.norm_bytes == 2 * (plain.norm_bytes + 2 * inner)
    assert (mixed.compute_dtype, mixed.kv_dtype) == (Dtype.bfloat16, Dtype.bfloat16)
    assert mixed.kv_bytes_per_token == plain.kv_bytes_per_token
    assert [unit.format.name for unit in mixed.of_kind(UnitKind.attn)] == ["BF16", "BF16"]
    assert [unit.format.name for unit in mixed.of_kind(UnitKind.norm)] == ["F32"]


@pytest.mark.parametrize(("said", "why"), [("float32", "dtype is float32"), ("float16", "dtype is float16")])
def test_a_config_of_another_dtype_than_the_weights_is_refused_before_a_plan(tmp_path: Path, said: str, why: str) -> None:
    directory = say_dtype(save_tiny(tmp_path / "tiny", layers=2), said)
    with pytest.raises(UserError, match=rf"config\.json: {why} and the weights are BF16; .*: set dtype to bfloat16"):
        spec_from_checkpoint(directory)
    with pytest.raises(UserError, match=r"is BF16 and parameter .* float\d\d; weights are read as stored: set dtype in config\.json"):
        open_skeleton(directory)


def test_a_config_without_a_dtype_has_that_of_the_weights(tmp_path: Path) -> None:
    directory = say_dtype(save_tiny(tmp_path / "tiny", layers=2), None)
    assert spec_from_checkpoint(directory).compute_dtype is Dtype.bfloat16
    assert {p.dtype for p in open_skeleton(directory).model.parameters()} == {torch.bfloat16}


def say_dtype(directory: Path, dtype: str | None) -> Path:
    """``directory`` with another dtype in its config, or with none."""
    config = json.loads((directory / "config.json").read_text())
    del config["dtype"]
    (directory / "config.json").write_text(json.dumps(config | ({} if dtype is None else {"dtype": dtype})))
    return directory

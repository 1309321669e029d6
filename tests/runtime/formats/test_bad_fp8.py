"""What is wrong with a coded checkpoint is told in one line before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.runtime.model.skeleton import build_skeleton
from penstock.runtime.model.stored_formats import reads_weight
from penstock.runtime.tools.pack import pack_checkpoint
from tests.runtime.formats.coded_checkpoints import FP8_BLOCKS, coded, edit, fp8_blocks, say
from tests.runtime.sessions import opened
from tests.support import decisions, plan_for, save_tiny

Q = "model.layers.1.self_attn.q_proj"
SCALE = f"{Q}.weight_scale_inv"
Change = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = save_tiny(tmp_path_factory.mktemp("bad") / "tiny", layers=2, hidden_size=128, intermediate_size=256, head_dim=32)
    return coded(made, fp8_blocks, FP8_BLOCKS)


@pytest.fixture
def own(sound: Path, tmp_path: Path) -> Path:
    return Path(copytree(sound, tmp_path / "own"))


def pack(checkpoint: Path, out: Path, adapter: Path | None = None) -> None:
    pack_checkpoint(checkpoint, out, None, False, lambda *_: None, adapter)


WRONG: dict[str, tuple[Change, str]] = {
    "no scale": (lambda t: t.pop(SCALE), rf"tensor {Q}\.weight in FP8 has no scale beside it; download it again"),
    "no weight": (lambda t: t.pop(f"{Q}.weight"), rf"{SCALE} has no weight beside it"),
    "a scale too many": (lambda t: t.update({SCALE: torch.ones(1, 2)}), rf"{SCALE} is F32 of shape \[1, 2\]; .* needs \[1, 1\]"),
    "scales of another type": (lambda t: t.update({SCALE: t[SCALE].to(torch.int32)}), rf"{SCALE} is I32 of shape .* in F32, BF16, F16"),
    "another E5M2": (lambda t: t.update({f"{Q}.weight": t[f"{Q}.weight"].to(torch.float8_e5m2)}), r"is F8_E5M2, allowed are"),
}


@pytest.mark.parametrize("what", WRONG)
def test_leaves_that_do_not_fit_are_refused_at_solve(own: Path, what: str) -> None:
    change, told = WRONG[what]
    with pytest.raises(UserError, match=told):
        spec_from_checkpoint(edit(own, change))


def test_a_matrix_of_another_models_shape_is_refused_before_anything_is_read(own: Path) -> None:
    other = fp8_blocks(torch.randn(256, 128))
    edit(own, lambda t: t.update({f"{Q}.{leaf}": part for leaf, part in other.items()}))
    with pytest.raises(UserError, match=rf"{Q}\.weight in FP8 has shape \[256, 128\] for parameter .* of shape \[128, 128\]; config\.json"):
        build_skeleton(own)


def test_coded_tables_that_have_no_rows_are_refused(own: Path) -> None:
    edit(own, lambda t: t.update({f"lm_head.{leaf}": part for leaf, part in fp8_blocks(t["lm_head.weight"]).items()}))
    with pytest.raises(UserError, match=r"lm_head\.weight is stored in FP8, of which single rows cannot be read; .* use the model's BF16"):
        build_skeleton(own)


def test_a_module_that_looks_at_a_weight_is_known_by_its_forward() -> None:
    assert reads_weight(DeepseekV32Indexer, "weights_proj") and not reads_weight(DeepseekV32Indexer, "wk")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers_are_refused_by_run_and_pack(own: Path, tmp_path: Path, number: float) -> None:
    edit(own, lambda t: t[SCALE].fill_(number))
    told = rf"model\.safetensors: tensor {SCALE} holds scales that are no numbers"
    with pytest.raises(UserError, match=told), opened(plan_for(own, decisions()), own):
        pass
    with pytest.raises(UserError, match=told):
        pack(own, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_adapter_on_a_coded_checkpoint_is_refused(own: Path, tmp_path: Path) -> None:
    (tmp_path / "lora").mkdir()
    save_file({"a": torch.zeros(1)}, tmp_path / "lora" / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"own is stored in FP8, and an adapter is merged into plain weights; merge it into"):
        pack(own, tmp_path / "out", tmp_path / "lora")


def test_a_size_of_blocks_that_is_not_known_is_named(own: Path) -> None:
    say(own, quantization_config=FP8_BLOCKS | {"weight_block_size": [64, 64]})
    with pytest.raises(UserError, match=r"quant_method 'fp8' with weight_block_size \[64, 64\] is not read; read are fp8 in blocks"):
        spec_from_checkpoint(own)

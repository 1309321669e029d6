"""Checkpoints in FP8 run as they are published: planned by their stored bytes, streamed and packed to the logits of transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shutil import copytree

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.utils.quantization_config import CompressedTensorsConfig

from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.decided.decisions import ResidentForms, WeightForm
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.given.formats import QUANTISED
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.formats.codings import CODINGS
from penstock.runtime.formats.stored_linear import DECODED
from penstock.runtime.model.skeleton import open_skeleton
from penstock.runtime.store.verify import verify_store
from penstock.runtime.tools.pack import pack_checkpoint
from tests.runtime.formats.coded_checkpoints import (
    FP8_BLOCKS,
    LINEAR,
    coded,
    compressed,
    edit,
    fp8_blocks,
    fp8_rows,
    fp8_tensor,
    logits_of,
    same,
)
from tests.runtime.sessions import opened
from tests.runtime.steppers import said
from tests.support import HostCopier, decisions, plan_for, save_tiny

CPU = torch.device("cpu")
ROWS = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3] * 11], max_new_tokens=4, chunk_tokens=1 << 20)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
FLOAT = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "group_size": None}
MLA = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "num_key_value_heads": 4}

ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 2}


def blocks(directory: Path) -> Path:
    return coded(save_tiny(directory, "qwen3", layers=3, **SIZES), fp8_blocks, {**FP8_BLOCKS, "modules_to_not_convert": ["lm_head"]})


def rows(directory: Path) -> Path:
    return coded(save_tiny(directory, "qwen2", layers=3, **SIZES), fp8_rows, compressed("float-quantized", FLOAT | {"strategy": "channel"}))


def tensors(directory: Path) -> Path:
    return coded(save_tiny(directory, layers=3, **SIZES), fp8_tensor, compressed("float-quantized", FLOAT | {"strategy": "tensor"}))


MADE = {"FP8": blocks, "FP8-row": rows, "FP8-tensor": tensors}


@pytest.fixture(scope="module", params=MADE)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for each format, whose name its directory has."""
    return MADE[request.param](tmp_path_factory.mktemp("fp8") / request.param)


def dequantized(checkpoint: Path) -> torch.nn.Module:
    """By transformers."""
    method = AutoConfig.from_pretrained(checkpoint).quantization_config["quant_method"]
    how = FineGrainedFP8Config(dequantize=True) if method == "fp8" else CompressedTensorsConfig(run_compressed=False)
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, quantization_config=how).eval()


def test_streamed_and_packed_logits_are_those_of_transformers(checkpoint: Path, tmp_path: Path) -> None:
    want = list(said(dequantized(checkpoint), ROWS).logits)
    with opened(plan_for(checkpoint, decisions()), checkpoint) as session:
        assert same(logits_of(session, ROWS), want)
    packed = tmp_path / "packed"
    pack_checkpoint(checkpoint, packed, None, False, lambda *_: None)
    assert verify_store(packed, lambda *_: None)["nbytes"]
    assert spec_from_checkpoint(packed).units == spec_from_checkpoint(checkpoint).units
    with opened(plan_for(packed, decisions(gpu=True, resident=(1, 2, 1)), gpu=True), packed, HostCopier()) as session:
        assert same(logits_of(session, ROWS), want)


@pytest.mark.parametrize("forms", [("decoded", "decoded"), ("stored", "decoded")], ids=" ".join)
def test_residents_that_stay_decoded_give_the_same_logits(checkpoint: Path, forms: tuple[str, str]) -> None:
    with opened(plan_for(checkpoint, decisions()), checkpoint) as session:
        want = logits_of(session, ROWS)
    made = decisions(gpu=True, resident=(2, 2, 1))
    made = replace(made, weights=replace(made.weights, forms=ResidentForms(*map(WeightForm, forms))))
    with opened(plan_for(checkpoint, made, gpu=True), checkpoint, HostCopier()) as session:
        assert same(logits_of(session, ROWS), want)
        kept = [m for m in session.engine.model.modules() if getattr(m, DECODED, None) is not None]
        assert len(kept) == 2 * (4 * (forms[0] == "decoded") + 3 * (forms[1] == "decoded")), (
            "4 matrices of attention, 3 of an FFN, in 2 layers"
        )


def test_deepseeks_sizes_that_are_no_whole_blocks_are_those_of_its_decoded_checkpoint(tmp_path: Path) -> None:
    """Latent attention, a dense layer, routed experts with scales of their own; transformers decodes whole blocks alone."""
    sizes = {"hidden_size": 192, "intermediate_size": 200, "moe_intermediate_size": 136, "first_k_dense_replace": 1, **MLA, **ROUTED}
    plain = save_tiny(tmp_path / "plain", "deepseek_v3", layers=2, **sizes)
    checkpoint = coded(Path(copytree(plain, tmp_path / "coded")), fp8_blocks, FP8_BLOCKS)
    edit(plain, lambda tensors: tensors.update({n: decoded(fp8_blocks(t)) for n, t in tensors.items() if LINEAR.search(n)}))
    want = list(said(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16).eval(), ROWS).logits)
    with opened(plan_for(checkpoint, decisions()), checkpoint) as session:
        got = logits_of(session, ROWS)
    assert {unit.format.name for unit in spec_from_checkpoint(checkpoint).of_kind(UnitKind.expert)} == {"FP8"}
    assert same(got, want)


def decoded(stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """Each element by the scale of its own block."""
    rows, columns = (torch.arange(size) // 128 for size in stored["weight"].shape)
    return (stored["weight"].float() * stored["weight_scale_inv"][rows[:, None], columns[None]]).to(torch.bfloat16)


def test_a_units_planned_bytes_are_those_that_the_runtime_moves(checkpoint: Path) -> None:
    spec, store = spec_from_checkpoint(checkpoint), open_skeleton(checkpoint).store
    for kind in (UnitKind.attn, UnitKind.ffn):
        for unit in spec.of_kind(kind):
            assert unit.format.name == checkpoint.name
            assert unit.stored_bytes == sum(t.nbytes for t in store.unit(Unit(kind.value, unit.layer or 0)).tensors)
    outside = sum(t.nbytes for layout in store.others().values() for t in layout.tensors)
    assert outside == spec.norm_bytes + spec.embed_bytes + spec.head_bytes
    assert spec.scratch_bytes == 128 * 256 * 2


def test_all_formats_that_plans_know_have_a_coding() -> None:
    assert QUANTISED.keys() <= CODINGS.keys()

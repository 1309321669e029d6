"""On a real card: coded experts are multiplied where they lie, one by one and several at once, and a stream of them runs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from bench.gpt_oss_synth import gpt_oss_config, write_gpt_oss
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.decided.decisions import ExpertSlots, Tier
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.formats.kernels.e2m1_matrix import E2m1Matrix
from penstock.runtime.formats.kernels.on_card import clamped_gate, e2m1_kernels
from penstock.runtime.formats.mxfp4 import Mxfp4
from penstock.runtime.memory.device import CudaDevice
from tests.runtime.formats.coded_checkpoints import coded, compressed, packed, whole
from tests.runtime.formats.test_coded_experts import EXPERTS, fp8, nvfp4
from tests.runtime.sessions import opened
from tests.support import decisions, plan_for, save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")

BATCHES = (
    Batch(prompts=[[5, 9, 200, 31, 7]], max_new_tokens=6, chunk_tokens=1 << 20),
    Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3] * 80], max_new_tokens=4, chunk_tokens=1 << 20),
)
LAYERS = 3
CARD = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gpt-oss") / "tiny"
    given = {"layers": str(LAYERS), "hidden": "256", "experts": "16", "vocab": "500"}
    write_gpt_oss(gpt_oss_config(given) | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}, directory)
    return directory


def slots_of(rows: int, columns: int, count: int) -> list[E2m1Matrix]:
    """Experts in slots of one block on the card, behind each other in another order."""
    codes_bytes, scales_bytes = rows * columns // 2, rows * columns // 32
    stride = -(-(codes_bytes + scales_bytes + 2 * rows) // 256) * 256
    block = torch.randint(0, 256, (count, stride), dtype=torch.uint8, device=CARD)
    made = []
    for slot in torch.randperm(count).tolist():
        codes, scales, bias = block[slot].split([codes_bytes, scales_bytes, stride - codes_bytes - scales_bytes])
        scales.random_(115, 125)
        bias[: 2 * rows].view(torch.bfloat16).normal_()
        made.append(E2m1Matrix(codes.view(rows, -1, 16), scales.view(rows, -1), bias=bias[: 2 * rows].view(torch.bfloat16)))
    return made


@pytest.mark.parametrize(("rows", "columns"), [(5760, 2880), (2880, 2880), (96, 64)])
def test_experts_multiplied_at_once_are_near_those_that_are_decoded(rows: int, columns: int) -> None:
    kernels = e2m1_kernels(CARD)
    assert kernels is not None
    matrices = slots_of(rows, columns, 10)
    for count in (1, 4, 10):
        for height in {1, count}:
            x = torch.randn(height, columns, dtype=torch.bfloat16, device=CARD)
            made = kernels.experts(x, matrices[:count])
            assert made is not None
            for number, matrix in enumerate(matrices[:count]):
                weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=CARD)
                Mxfp4().decode({"blocks": matrix.codes, "scales": matrix.scales}, weight)
                on_cpu = torch.empty(rows, columns, dtype=torch.bfloat16)
                Mxfp4().decode({"blocks": matrix.codes.cpu(), "scales": matrix.scales.cpu()}, on_cpu)
                assert torch.equal(weight.cpu(), on_cpu)
                want = F.linear(x[number if height > 1 else 0].float(), weight.float(), matrix.bias.float())
                assert (made[number].float() - want).abs().max() <= 0.01 * want.abs().max()


def test_gpt_oss_gate_is_the_models() -> None:
    from types import SimpleNamespace

    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    both = (torch.randn(4, 5760, device=CARD) * 4).bfloat16()
    gate = clamped_gate(CARD, 1.702, 7.0)
    assert gate is not None
    want = GptOssExperts._apply_gate(SimpleNamespace(alpha=1.702, limit=7.0), both.float())
    assert (gate(both).float() - want).abs().max() <= 0.01 * want.abs().max()


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("in_dram", [1.0, 0.6])
def test_streamed_experts_say_on_a_card_what_they_say_on_the_cpu(checkpoint: Path, share: float, in_dram: float) -> None:
    units = spec_from_checkpoint(checkpoint).experts.units
    made = decisions(
        gpu=True, resident=(LAYERS, LAYERS, 1), batch=3, experts=ExpertSlots(int(units * share), int(units * in_dram), chunk_bytes=1 << 16)
    )
    for batch in BATCHES:
        with opened(plan_for(checkpoint, decisions(batch=3)), checkpoint) as session:
            session.load(batch)
            want = session.generate(batch, Sampler(Sampling(), torch.device("cpu")), keep_logits=True)
        with opened(plan_for(checkpoint, made, gpu=True), checkpoint, CudaDevice(0), CARD) as session:
            session.load(batch)
            got = session.generate(batch, Sampler(Sampling(), CARD), keep_logits=True)
        first, right = got.logits[0].float().cpu(), want.logits[0].float()
        assert (first - right).abs().max() <= 0.03 * right.abs().max()


def int4(directory: Path) -> Path:
    """Each expert's matrices in groups of 32, which no kernel looks up."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
    plain = save_tiny(directory, "qwen3_moe", layers=LAYERS, **EXPERTS)
    coder = lambda matrix: packed(whole(matrix, 4, 32, torch.bfloat16, symmetric=True), 4)  # noqa: E731
    said = compressed("pack-quantized", weights) | {"ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]}
    return coded(plain, coder, said, re.compile(r"mlp\.experts\.\d+\.\w+_proj\.weight$"))


@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("in_dram", [1.0, 0.6])
@pytest.mark.parametrize("form", ["MXFP4", "FP8", "NVFP4", "INT4"])
def test_recorded_experts_say_what_launched_ones_say(tmp_path: Path, checkpoint: Path, form: str, share: float, in_dram: float) -> None:
    """One row's step: where all of a layer's experts are together, they are one launch."""
    made = {"FP8": fp8, "NVFP4": nvfp4, "INT4": int4}
    where = made[form](tmp_path / form) if form in made else checkpoint
    units = spec_from_checkpoint(where).experts.units
    slots = ExpertSlots(int(units * share), int(units * in_dram), chunk_bytes=1 << 16)
    resident = decisions(gpu=True, resident=(LAYERS, LAYERS, 1), embedding=Tier.vram, cap=0, hwm=3, distance=0, experts=slots)
    plan = plan_for(where, resident, gpu=True)
    batch, found = replace(BATCHES[0], max_new_tokens=24), []
    for graphs in (False, True):
        with opened(plan, where, CudaDevice(0), CARD, graphs=graphs) as session:
            session.load(batch)
            for _ in range(2):
                found.append(session.generate(batch, Sampler(Sampling(), CARD), keep_logits=True))
            facts = session.engine.facts()["graphs"]
            if graphs:
                assert facts["refused"] is None and facts["steps"] > 0 and facts["pieces"] == 2 * LAYERS + 1, facts
                assert facts["visits"] == LAYERS * facts["steps"] if share == in_dram == 1 else facts["visits"] > 0, facts
    for got in found[1:]:
        alike = next((k for k, (a, b) in enumerate(zip(got.tokens[0], found[0].tokens[0], strict=True)) if a != b), 23)
        assert alike > 0, "the prompt's own token"
        for a, b in zip(got.logits[: alike + 1], found[0].logits[: alike + 1], strict=True):
            assert torch.allclose(a.float(), b.float(), atol=0.03 * b.abs().max().item(), rtol=0)

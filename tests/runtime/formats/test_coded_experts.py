"""Routed experts in coded formats: streamed, cached in both tiers and packed, to the logits of the model that is decoded beforehand."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from bench.gpt_oss_synth import gpt_oss_config, write_gpt_oss
from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint, stored_matrices
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.engine.session import Session
from penstock.runtime.formats.codings import CODINGS
from penstock.runtime.model.skeleton import open_skeleton
from penstock.runtime.tools.pack import pack_checkpoint
from tests.runtime.formats.coded_checkpoints import FP8_BLOCKS, WEIGHTS, coded, compressed, fp8_blocks, packed, say, whole
from tests.runtime.sessions import opened
from tests.runtime.steppers import said
from tests.support import HostCopier, decisions, plan_for, save_tiny

CPU = torch.device("cpu")
BATCHES = (
    Batch(prompts=[[5, 9, 200, 31, 7]], max_new_tokens=5, chunk_tokens=1 << 20),
    Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3] * 11], max_new_tokens=3, chunk_tokens=1 << 20),
)
"""One row, whose experts are computed together, and several."""
TINY_GPT_OSS = {"layers": "3", "hidden": "64", "experts": "8", "vocab": "300"}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "hidden_size": 128, "head_dim": 32}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True, "dynamic": False}


def gpt_oss(directory: Path) -> Path:
    """As published: stacks of blocks and scales, biases, sinks."""
    config = gpt_oss_config(TINY_GPT_OSS) | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    write_gpt_oss(config, directory)
    return directory


def fp8(directory: Path) -> Path:
    """Scales of blocks beside each expert, as DeepSeek-V3 and Qwen3-30B-A3B-FP8 have them."""
    return coded(save_tiny(directory, "qwen3_moe", layers=3, **EXPERTS), fp8_blocks, {**FP8_BLOCKS, "modules_to_not_convert": ["lm_head"]})


def nvfp4(directory: Path) -> Path:
    """Each expert's gate, up and down with a divisor of its own."""

    def coder(matrix: torch.Tensor) -> dict[str, torch.Tensor]:
        rows, columns = matrix.shape
        scale = (torch.rand(rows, columns // 16) * 200 + 50).to(torch.float8_e4m3fn)
        packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        return {"weight_packed": packed, "weight_scale": scale, "weight_global_scale": torch.rand(1) * 1e4 + 5e3}

    return coded(save_tiny(directory, "qwen3_moe", layers=3, **EXPERTS), coder, compressed("nvfp4-pack-quantized", NVFP4))


def int4(directory: Path) -> Path:
    """Routed experts alone in groups of 32, as Kimi-K2 has them."""
    sizes = {"q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 128}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32, "dynamic": False}
    common = {"hidden_size": 128, "num_key_value_heads": 4, "first_k_dense_replace": 1}
    ignored = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp.gate_proj"]
    said = compressed("pack-quantized", weights) | {"ignore": ignored}
    plain = save_tiny(directory, "deepseek_v3", layers=3, **common, **sizes, **experts)
    routed = re.compile(r"mlp\.experts\.\d+\.\w+_proj\.weight$")
    return coded(plain, lambda matrix: packed(whole(matrix, 4, 32, torch.bfloat16, symmetric=True), 4), said, routed)


MADE: dict[str, Callable[[Path], Path]] = {"MXFP4": gpt_oss, "FP8": fp8, "NVFP4": nvfp4, "INT4-32": int4}


@pytest.fixture(scope="module", params=MADE)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for each format, whose name its directory has."""
    return MADE[request.param](tmp_path_factory.mktemp("experts") / request.param)


@pytest.fixture(scope="module")
def wanted(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[torch.Tensor]]:
    """Logits of the dequantized model, of every batch."""
    model = dequantized(checkpoint, tmp_path_factory.mktemp("decoded"))
    return [list(said(model, batch).logits) for batch in BATCHES]


def dequantized(checkpoint: Path, aside: Path) -> nn.Module:
    """By transformers; NVFP4 and INT4 are decoded first, as the tests of those formats hold against their references."""
    ours = {"MXFP4": Mxfp4Config(dequantize=True), "FP8": FineGrainedFP8Config(dequantize=True)}.get(checkpoint.name)
    where = checkpoint if ours is not None else decoded(checkpoint, aside / checkpoint.name)
    more = {} if ours is None else {"quantization_config": ours}
    return AutoModelForCausalLM.from_pretrained(where, dtype=torch.bfloat16, **more).eval()


def decoded(checkpoint: Path, plain: Path) -> Path:
    """The same weights in BF16."""
    shutil.copytree(checkpoint, plain)
    tensors = load_file(plain / WEIGHTS)
    for name, matrix in stored_matrices(checkpoint).items():
        out = torch.empty(matrix.shape, dtype=torch.bfloat16)
        CODINGS[matrix.format.name].decode({leaf: tensors.pop(stored.tensor) for leaf, stored in matrix.leaves.items()}, out)
        tensors[name] = out
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith("weight_shape")}
    save_file(tensors, plain / WEIGHTS, metadata={"format": "pt"})
    return say(plain, quantization_config=None)


def logits(session: Session, batch: Batch) -> list[torch.Tensor]:
    return list(session.generate(batch, Sampler(Sampling(), CPU), keep_logits=True).logits)


def check(session: Session, wanted: list[list[torch.Tensor]]) -> None:
    session.load(BATCHES[1])
    for batch, want in zip(BATCHES, wanted, strict=True):
        got = logits(session, batch)
        assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_experts_streamed_from_the_ssd_are_the_dequantized_models(checkpoint: Path, wanted: list[list[torch.Tensor]]) -> None:
    with opened(plan_for(checkpoint, decisions(batch=3)), checkpoint) as session:
        check(session, wanted)
        assert session.engine.experts is not None and session.engine.experts.dram.stats.misses


def test_packed_experts_cached_on_a_card_are_too(checkpoint: Path, wanted: list[list[torch.Tensor]], tmp_path: Path) -> None:
    packed = tmp_path / "packed"
    pack_checkpoint(checkpoint, packed, None, False, lambda *_: None)
    assert spec_from_checkpoint(packed).units == spec_from_checkpoint(checkpoint).units
    plan = plan_for(packed, decisions(gpu=True, resident=(1, 2, 1), batch=3), gpu=True)
    with opened(plan, packed, HostCopier()) as session:
        check(session, wanted)
        assert session.engine.experts is not None and session.engine.experts.facts()["missed"]["vram"]
        assert session.engine.experts.facts()["host_s_per_visit"]


def test_an_experts_planned_bytes_are_those_that_the_runtime_moves(checkpoint: Path) -> None:
    spec, skeleton = spec_from_checkpoint(checkpoint), open_skeleton(checkpoint)
    for unit in spec.of_kind(UnitKind.expert):
        assert unit.format.name == checkpoint.name
        for expert in range(unit.count):
            layout = skeleton.store.unit(Unit("expert", unit.layer or 0, expert))
            assert unit.stored_bytes == layout.payload_bytes


def test_an_exponent_of_255_is_refused_when_a_store_is_packed(tmp_path: Path) -> None:
    bad = gpt_oss(tmp_path / "bad")
    tensor = "model.layers.1.mlp.experts.down_proj_scales"
    (shard,) = bad.glob("*.safetensors")
    tensors = load_file(shard)
    tensors[tensor][3, 7, 1] = 255
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(UserError, match=f"{tensor} holds scales that are no numbers"):
        pack_checkpoint(bad, tmp_path / "packed", None, False, lambda *_: None)

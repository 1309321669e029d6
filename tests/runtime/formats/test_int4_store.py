"""`pack format=int4` rounds to the nearest as compressed-tensors does, and a run from it gives the rounded weights' own logits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.runtime.asked.run_schema import PackFormat
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.formats.codings import CODINGS
from penstock.runtime.store.verify import verify_store
from penstock.runtime.tools.pack import pack_checkpoint
from penstock.runtime.tools.recoding.to_int4 import ToInt4
from tests.runtime.formats.coded_checkpoints import edit
from tests.runtime.sessions import opened
from tests.runtime.steppers import said
from tests.support import HostCopier, decisions, plan_for, save_tiny

ROWS = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3] * 11], max_new_tokens=4, chunk_tokens=1 << 20)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def pack(checkpoint: Path, out: Path) -> Path:
    pack_checkpoint(checkpoint, out, None, False, lambda *_: None, form=PackFormat.int4)
    return out


def rounded(name: str, matrix: torch.Tensor) -> torch.Tensor:
    """What the store holds of ``matrix``, decoded."""
    packed, scale = ToInt4({name: tuple(matrix.shape)}, ()).encode(name, matrix).values()
    CODINGS["INT4-128"].decode({"weight_packed": packed, "weight_scale": scale}, out := torch.empty_like(matrix))
    return out


@pytest.mark.parametrize("model_type", ["qwen3", "mixtral"])
def test_a_run_from_it_gives_the_rounded_weights_own_logits(tmp_path: Path, model_type: str) -> None:
    sizes = SIZES if model_type == "qwen3" else {"hidden_size": 128, "intermediate_size": 256}
    checkpoint = save_tiny(tmp_path / "tiny", model_type, layers=3, **sizes)
    packed, plain = pack(checkpoint, tmp_path / "packed"), Path(shutil.copytree(checkpoint, tmp_path / "rounded"))
    before, after = spec_from_checkpoint(checkpoint), spec_from_checkpoint(packed)
    assert {unit.format.name for unit in after.units} == {"INT4-128", "BF16"} and after.weight_bytes < 0.6 * before.weight_bytes
    assert after.of_kind(UnitKind.embed) == before.of_kind(UnitKind.embed) and after.of_kind(UnitKind.head) == before.of_kind(UnitKind.head)
    assert verify_store(packed, lambda *_: None)["nbytes"] and json.loads((packed / "config.json").read_text())["quantization_config"]

    def round_all(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if ".layers." in name and tensor.dim() == 2 and tensor.shape[1] % 128 == 0 and not name.endswith("gate.weight"):
                tensors[name] = rounded(name, tensor)

    edit(plain, round_all)
    with opened(plan_for(plain, decisions()), plain) as session:
        session.load(ROWS)
        want = list(session.generate(ROWS, Sampler(Sampling(), torch.device("cpu")), keep_logits=True).logits)
    if model_type == "qwen3":
        theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16).eval()
        assert all(torch.equal(a, b) for a, b in zip(said(theirs, ROWS).logits, want, strict=True))
    card = model_type == "qwen3"
    how = decisions(gpu=True, resident=(1, 2, 1)) if card else decisions()
    with opened(plan_for(packed, how, gpu=card), packed, *([HostCopier()] if card else [])) as session:
        session.load(ROWS)
        got = list(session.generate(ROWS, Sampler(Sampling(), torch.device("cpu")), keep_logits=True).logits)
    assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_numbers_are_those_that_compressed_tensors_rounds_to() -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    torch.manual_seed(0)
    matrix = torch.randn(64, 512).bfloat16()
    matrix[3, 128:256] = 0
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, strategy="group", group_size=128)
    grid = matrix.float().view(64, 4, 128)
    scale, _ = calculate_qparams(grid.amin(-1), grid.amax(-1), args)
    scale = scale.bfloat16().float()
    wanted = fake_quantize(matrix.float(), scale, torch.zeros_like(scale), args)
    assert torch.equal(rounded("x.weight", matrix), wanted.bfloat16())


def test_columns_that_make_no_whole_groups_stay_as_they_are(tmp_path: Path) -> None:
    checkpoint = save_tiny(tmp_path / "tiny", layers=1, **(SIZES | {"intermediate_size": 192}))
    packed = pack(checkpoint, tmp_path / "packed")
    manifest = json.loads((packed / "config.json").read_text())["quantization_config"]
    assert "model.layers.0.mlp.down_proj" in manifest["ignore"]
    with opened(plan_for(packed, decisions()), packed) as session:
        session.load(ROWS)
        assert session.generate(ROWS, Sampler(Sampling(), torch.device("cpu"))).tokens
    with pytest.raises(UserError, match="has no matrix of its own whose columns are a multiple of 128; pack it without format="):
        pack(save_tiny(tmp_path / "narrow", layers=1), tmp_path / "none")


def test_what_is_not_finite_is_refused_by_its_name(tmp_path: Path) -> None:
    checkpoint = save_tiny(tmp_path / "tiny", layers=1, **SIZES)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][7, 9] = float("nan")
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"format=int4: model\.layers\.0\.mlp\.up_proj\.weight has numbers that are not finite"):
        pack(checkpoint, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()

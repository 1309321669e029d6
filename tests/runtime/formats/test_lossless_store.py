"""`pack format=lossless` writes three quarters of the bytes, and every logit of a run from it is the BF16 checkpoint's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.runtime.asked.run_schema import PackFormat
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.validate import load_unstreamed
from penstock.runtime.model.skeleton import open_skeleton
from penstock.runtime.store.verify import verify_store
from penstock.runtime.tools.pack import pack_checkpoint
from tests.runtime.formats.coded_checkpoints import edit, logits_of, say
from tests.runtime.sessions import opened
from tests.support import HostCopier, decisions, plan_for, save_tiny

CPU = torch.device("cpu")
ROWS = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3] * 11], max_new_tokens=4, chunk_tokens=1 << 20)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


def pack(checkpoint: Path, out: Path, **more: Path) -> dict:
    return pack_checkpoint(checkpoint, out, None, False, lambda *_: None, form=PackFormat.lossless, **more)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With numbers of every exponent in a matrix of its first layer's FFN, and some odd ones in the second layer."""
    made = save_tiny(tmp_path_factory.mktemp("lossless") / "plain", "qwen3", layers=3, **SIZES)

    def odd(tensors: dict[str, torch.Tensor]) -> None:
        numbers = torch.arange(256 * 128).to(torch.int16) & 0x3F7F
        tensors["model.layers.0.mlp.up_proj.weight"] = numbers.view(torch.bfloat16).view(256, 128)
        tensors["model.layers.1.self_attn.q_proj.weight"][3, :4] = torch.tensor([0.0, -0.0, 1e-39, 1e4], dtype=torch.bfloat16)

    return edit(made, odd)


@pytest.fixture(scope="module")
def packed(checkpoint: Path) -> Path:
    out = checkpoint.parent / "packed"
    found = pack(checkpoint, out)
    assert (found["format"], found["plain_units"]) == ("lossless", ["ffn.0"])
    return out


def test_logits_are_the_checkpoints_own(checkpoint: Path, packed: Path) -> None:
    with opened(plan_for(checkpoint, decisions()), checkpoint) as session:
        want = logits_of(session, ROWS)
    with opened(plan_for(packed, decisions()), packed) as session:
        got = logits_of(session, ROWS)
    with opened(plan_for(packed, decisions(gpu=True, resident=(1, 2, 1)), gpu=True), packed, HostCopier()) as session:
        through_vram = logits_of(session, ROWS)
    for one, other, third in zip(want, got, through_vram, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16)) and torch.equal(one.view(torch.int16), third.view(torch.int16))
    assert verify_store(packed, lambda *_: None)["nbytes"]


def test_routed_experts_are_streamed_coded_to_the_same_bits(tmp_path: Path) -> None:
    plain, out = save_tiny(tmp_path / "moe", "mixtral", layers=2, **SIZES), tmp_path / "packed"
    pack(plain, out)
    before, after = spec_from_checkpoint(plain), spec_from_checkpoint(out)
    for one, other in zip(before.of_kind(UnitKind.expert), after.of_kind(UnitKind.expert), strict=True):
        assert other.format.name == "lossless" and other.count == one.count and 0.75 < other.stored_bytes / one.stored_bytes < 0.82
    with opened(plan_for(plain, decisions()), plain) as session:
        want = logits_of(session, ROWS)
    with opened(plan_for(out, decisions()), out) as session:
        got = logits_of(session, ROWS)
    assert all(torch.equal(one.view(torch.int16), other.view(torch.int16)) for one, other in zip(want, got, strict=True))
    ids = torch.tensor([[5, 9, 200, 31, 7]])
    assert torch.equal(load_unstreamed(out, CPU)(ids).logits, load_unstreamed(plain, CPU)(ids).logits)


def test_units_take_three_quarters_but_for_one_whose_exponents_do_not_fit(checkpoint: Path, packed: Path) -> None:
    plain, spec, store = spec_from_checkpoint(checkpoint), spec_from_checkpoint(packed), open_skeleton(packed).store
    for kind in (UnitKind.attn, UnitKind.ffn):
        for before, after in zip(plain.of_kind(kind), spec.of_kind(kind), strict=True):
            fits = (kind, after.layer) != (UnitKind.ffn, 0)
            assert after.format.name == ("lossless" if fits else "BF16")
            assert after.elements == before.elements
            assert (0.75 < after.stored_bytes / before.stored_bytes < 0.82) if fits else after.stored_bytes == before.stored_bytes
            moved = store.unit(Unit(kind.value, after.layer or 0))
            assert after.stored_bytes == sum(tensor.nbytes for tensor in moved.tensors)
    assert spec.digest != plain.digest and spec.compute_dtype == plain.compute_dtype
    assert spec.scratch_bytes == 128 * 256 * 2


def test_what_is_not_bf16_is_refused_in_a_line(tmp_path: Path) -> None:
    half = edit(save_tiny(tmp_path / "half", layers=1), lambda tensors: tensors.update({n: t.half() for n, t in tensors.items()}))
    say(half, dtype="float16")
    with pytest.raises(UserError, match=r"^format=lossless: .* computes in float16, allowed is bfloat16; .*$"):
        pack(half, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_checkpoint_that_is_coded_already_is_refused(checkpoint: Path, tmp_path: Path, packed: Path) -> None:
    with pytest.raises(UserError, match="already a packed store"):
        pack(packed, tmp_path / "out")
    with pytest.raises(UserError, match="adapter=.* cannot be merged at the same time"):
        pack(checkpoint, tmp_path / "out", adapter=tmp_path)


def test_weights_of_which_none_fit_are_refused(tmp_path: Path) -> None:
    made = save_tiny(tmp_path / "wild", layers=1, **SIZES)

    def scatter(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if "proj" in name]:
            shape = tensors[name].shape
            tensors[name] = (torch.arange(shape.numel()).to(torch.int16) & 0x3F7F).view(torch.bfloat16).view(shape)

    with pytest.raises(UserError, match="exponents take more than 4 bits"):
        pack(edit(made, scatter), tmp_path / "out")


def _resealed(packed: Path, change) -> None:  # noqa: ANN001
    """``packed`` with its manifest changed, and its checksum made anew."""
    path = packed / "manifest.json"
    body = json.loads(path.read_text())
    body.pop("checksum")
    change(body)
    body["checksum"] = xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps(body))


@pytest.fixture
def copy(checkpoint: Path, tmp_path: Path) -> Path:
    out = tmp_path / "copy"
    pack(checkpoint, out)
    return out


def test_a_codebook_that_does_not_fit_is_refused_at_solve(copy: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight.lossless_exponents"

    def shorter(body: dict) -> None:
        body["tensors"][name] |= {"shape": [15], "nbytes": 15}

    _resealed(copy, shorter)
    with pytest.raises(UserError, match=rf"{name} is U8 of shape \[15\], which does not fit"):
        spec_from_checkpoint(copy)
    _resealed(copy, lambda body: body["tensors"].pop(name))
    with pytest.raises(UserError, match=f"{name} of a matrix in the lossless form is missing"):
        spec_from_checkpoint(copy)


@pytest.mark.parametrize("places", [[-1], [128 * 256], [5, 3]], ids=str)
def test_damaged_escapes_are_refused_before_anything_is_loaded(copy: Path, places: list[int]) -> None:
    (section,) = [s for s in json.loads((copy / "manifest.json").read_text())["units"] if s["name"] == "ffn.2"]
    (at,) = [p for p in section["parameters"] if p[0] == "mlp.down_proj.at"]
    with open(copy / "weights.bin", "r+b") as file:
        file.seek(section["offset"] + at[3])
        file.write(b"".join(place.to_bytes(4, "little", signed=True) for place in places))
    with pytest.raises(UserError, match=r"mlp\.down_proj\.at of ffn\.2 names places outside of its matrix"):
        open_skeleton(copy)


def test_the_store_names_its_format_and_holds_the_config(checkpoint: Path, packed: Path) -> None:
    before, after = (json.loads((path / "config.json").read_text()) for path in (checkpoint, packed))
    assert after == before | {"quantization_config": {"quant_method": "lossless"}}
    held = json.loads((packed / "manifest.json").read_text())["tensors"]
    plain = load_file(checkpoint / "model.safetensors")
    assert held["model.layers.0.mlp.up_proj.weight"]["dtype"] == "BF16"
    assert "model.layers.1.mlp.up_proj.weight" not in held and "model.layers.1.mlp.up_proj.weight.lossless_low" in held
    assert held.keys() & plain.keys() >= {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}


def test_a_config_that_says_lossless_without_a_store_has_nothing_coded(tmp_path: Path) -> None:
    made = save_tiny(tmp_path / "said", layers=1)
    plain = spec_from_checkpoint(made).units
    assert spec_from_checkpoint(say(made, quantization_config={"quant_method": "lossless"})).units == plain

"""Checkpoints of whole numbers run as compressed-tensors, GPTQ and AWQ publish them: planned, streamed and packed to the logits of their
decoded weights."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.quantization_config import CompressedTensorsConfig

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.runtime.asked.run_schema import CpuProduct, PackFormat
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.engine.passes.sampling import Sampler, Sampling
from penstock.runtime.model.skeleton import open_skeleton
from penstock.runtime.store.verify import verify_store
from penstock.runtime.tools.pack import pack_checkpoint
from tests.runtime.formats.coded_checkpoints import (
    LINEAR,
    Whole,
    awq,
    coded,
    compressed,
    edit,
    gptq,
    in_words,
    logits_of,
    packed,
    same,
    say,
    whole,
)
from tests.runtime.sessions import opened
from tests.runtime.steppers import said
from tests.support import HostCopier, decisions, plan_for, save_tiny

CPU = torch.device("cpu")
ROWS = Batch(prompts=[[5, 9, 200, 31, 7], [17, 250], [3] * 11], max_new_tokens=4, chunk_tokens=1 << 20)
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
F16, BF16 = torch.float16, torch.bfloat16


class Made(NamedTuple):
    """How a checkpoint is quantised."""

    model_type: str
    dtype: torch.dtype
    round: Callable[[torch.Tensor], Whole]
    store: Callable[[Whole], dict[str, torch.Tensor]]
    said: dict[str, Any]


def weights(bits: int, group: int | None, symmetric: bool = True) -> dict[str, Any]:
    strategy = "group" if group else "channel"
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, "group_size": group, "dynamic": False}


def ordered(of: Whole) -> dict[str, torch.Tensor]:
    """GPTQ with ``desc_act``: groups of columns that do not follow each other, as if these were quantised in another order."""
    parts, order = gptq(of, 4), torch.arange(of.numbers.shape[1]).roll(7)
    return parts | gptq(Whole(of.numbers[:, order], of.zero, of.scale), 4) | {"g_idx": parts["g_idx"][order]}


def by_bytes(of: Whole) -> dict[str, torch.Tensor]:
    return {"weight": (of.numbers - 128).to(torch.int8), "weight_scale": of.scale}


PACKED, TOKENS = "pack-quantized", {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": False, "checkpoint_format": "gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
MADE = {
    "INT4-128": Made("llama", BF16, lambda m: whole(m, 4, 128, BF16, True), lambda w: packed(w, 4), compressed(PACKED, weights(4, 128))),
    "INT4-32-asym": Made(
        "qwen3", BF16, lambda m: whole(m, 4, 32, BF16), lambda w: packed(w, 4, False), compressed(PACKED, weights(4, 32, False))
    ),
    "INT8-row": Made("qwen2", BF16, lambda m: whole(m, 8, 0, BF16, True), by_bytes, compressed("int-quantized", weights(8, None), TOKENS)),
    "GPTQ4-64": Made("llama", F16, lambda m: whole(m, 4, 64, F16), lambda w: gptq(w, 4), GPTQ),
    "GPTQ4-64-order": Made("llama", BF16, lambda m: whole(m, 4, 64, F16), ordered, GPTQ | {"desc_act": True}),
    "AWQ-32": Made("qwen2", F16, lambda m: whole(m, 4, 32, F16), awq, AWQ),
}


def made(directory: Path, how: Made, sizes: Mapping[str, int] = SIZES, layers: int = 3) -> Path:
    """The checkpoint, and beside it ``decoded``: the same with its matrices decoded where they were rounded."""
    plain = save_tiny(directory / "decoded", how.model_type, layers=layers, **sizes)
    say(plain, dtype=str(how.dtype).removeprefix("torch."))
    edit(plain, lambda tensors: tensors.update({name: tensor.to(how.dtype) for name, tensor in tensors.items()}))
    stored = Path(shutil.copytree(plain, directory / directory.name))
    coded(stored, lambda matrix: how.store(how.round(matrix)), how.said)

    def decode(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if LINEAR.search(name) and tensor.dim() == 2:
                of = how.round(tensor)
                order = torch.arange(tensor.shape[1]).roll(7) if how.said.get("desc_act") else slice(None)
                tensors[name] = of.decoded()[:, order].to(how.dtype)

    edit(plain, decode)
    return stored


@pytest.fixture(scope="module", params=MADE)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for each way to store, whose format's name its directory has."""
    directory = tmp_path_factory.mktemp("whole") / request.param
    directory.mkdir()
    return made(directory, MADE[request.param])


def test_streamed_and_packed_logits_are_those_of_the_decoded_weights(checkpoint: Path, tmp_path: Path) -> None:
    dtype = MADE[checkpoint.name].dtype
    want = list(said(AutoModelForCausalLM.from_pretrained(checkpoint.parent / "decoded", dtype=dtype).eval(), ROWS).logits)
    if MADE[checkpoint.name].said["quant_method"] == "compressed-tensors":
        how = CompressedTensorsConfig(run_compressed=False)
        theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype, quantization_config=how).eval()
        assert same(list(said(theirs, ROWS).logits), want)
    with opened(plan_for(checkpoint, decisions()), checkpoint) as session:
        assert same(logits_of(session, ROWS), want)
    out = tmp_path / "packed"
    pack_checkpoint(checkpoint, out, None, False, lambda *_: None)
    assert verify_store(out, lambda *_: None)["nbytes"]
    assert spec_from_checkpoint(out).units == spec_from_checkpoint(checkpoint).units
    with opened(plan_for(out, decisions(gpu=True, resident=(1, 2, 1)), gpu=True), out, HostCopier()) as session:
        assert same(logits_of(session, ROWS), want)


@pytest.mark.parametrize("name", ["GPTQ4-64", "AWQ-32", "INT8-row"])
def test_routed_experts_are_read_as_they_are_stored(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}
    checkpoint = made(tmp_path / name, MADE[name]._replace(model_type="mixtral"), sizes)
    with opened(plan_for(checkpoint.parent / "decoded", decisions()), checkpoint.parent / "decoded") as session:
        want = logits_of(session, ROWS)
    assert {unit.format.name for unit in spec_from_checkpoint(checkpoint).of_kind(UnitKind.expert)} == {name}
    with opened(plan_for(checkpoint, decisions()), checkpoint) as session:
        assert same(logits_of(session, ROWS), want)


def test_groups_of_one_config_store_what_they_target(tmp_path: Path) -> None:
    """Attention in 8 bits and the rest in 4, as mixed-precision checkpoints have it."""
    attention, rest = MADE["INT8-row"], MADE["INT4-128"]
    plain = save_tiny(tmp_path / "decoded", layers=3, **SIZES)
    stored = Path(shutil.copytree(plain, tmp_path / "stored"))
    both = compressed("mixed-precision", {})
    kinds = {"re:.*self_attn.*": attention, "Linear": rest}
    both["config_groups"] = {
        f"group_{i}": how.said["config_groups"]["group_0"] | {"targets": [target]} for i, (target, how) in enumerate(kinds.items())
    }
    for how, only in ((attention, r"self_attn\.\w_proj\.weight$"), (rest, r"mlp\.\w+_proj\.weight$")):
        coded(stored, lambda matrix, how=how: how.store(how.round(matrix)), both, re.compile(only))
        names = re.compile(only)
        edit(plain, lambda t, how=how, names=names: t.update({n: how.round(v).decoded() for n, v in t.items() if names.search(n)}))
    spec = spec_from_checkpoint(stored)
    assert {unit.format.name for unit in spec.of_kind(UnitKind.attn)} == {"INT8-row"}
    assert {unit.format.name for unit in spec.of_kind(UnitKind.ffn)} == {"INT4-128"}
    with opened(plan_for(plain, decisions()), plain) as session:
        want = logits_of(session, ROWS)
    with opened(plan_for(stored, decisions()), stored) as session:
        assert same(logits_of(session, ROWS), want)


def test_trained_weights_say_what_transformers_says_of_them(shared_models: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(shared_models / "tiny-llama", tmp_path / "tiny-llama", copy_function=shutil.copy))
    how = MADE["INT4-128"]
    for path in (checkpoint, *checkpoint.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    coded(checkpoint, lambda matrix: how.store(how.round(matrix)), how.said)
    dequantized = CompressedTensorsConfig(run_compressed=False)
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=BF16, quantization_config=dequantized).eval()
    want = said(theirs, ROWS)
    with opened(plan_for(checkpoint, decisions()), checkpoint) as session:
        session.load(ROWS)
        got = session.generate(ROWS, Sampler(Sampling(), CPU), keep_logits=True)
    assert got.tokens == want.tokens and same(list(got.logits), list(want.logits))
    with opened(plan_for(checkpoint, decisions()), checkpoint, cpu_product=CpuProduct.stored) as session:
        session.load(ROWS)
        assert session.generate(ROWS, Sampler(Sampling(), CPU)).tokens == want.tokens


def test_a_units_planned_bytes_are_those_that_the_runtime_moves(checkpoint: Path) -> None:
    spec, store = spec_from_checkpoint(checkpoint), open_skeleton(checkpoint).store
    for kind in (UnitKind.attn, UnitKind.ffn):
        for unit in spec.of_kind(kind):
            assert unit.format.name == checkpoint.name
            assert unit.stored_bytes == sum(t.nbytes for t in store.unit(Unit(kind.value, unit.layer or 0)).tensors)
    ffn = spec.of_kind(UnitKind.ffn)[0]
    assert ffn.stored_bytes == 2 * ffn.format.stored_bytes(256, 128) + ffn.format.stored_bytes(128, 256)


def refused(directory: Path, **keys: Any) -> str:
    """The one line of a checkpoint whose quantization_config says ``keys``."""
    say(save_tiny(directory), quantization_config=keys)
    with pytest.raises(UserError) as raised:
        spec_from_checkpoint(directory)
    return str(raised.value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (GPTQ | {"bits": 3}, "gptq with bits 3, group_size 64, format gptq is not known; known are 4 and 8 bits"),
        (GPTQ | {"group_size": 48}, "group_size 48"),
        (GPTQ | {"checkpoint_format": "marlin"}, "format marlin"),
        (GPTQ | {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"}, "auto-round with bits 4"),
        (AWQ | {"version": "gemv"}, "awq with bits 4, group_size 32, version gemv"),
        (AWQ | {"zero_point": False}, "zero_point False is not known; known are 4 bits in the order of gemm with zero points"),
        (compressed(PACKED, weights(3, 128)), "compressed-tensors (pack-quantized) with num_bits 3"),
        (compressed(PACKED, weights(4, 16)), "group_size 16"),
        (compressed(PACKED, weights(4, 128) | {"symmetric": "yes"}), "symmetric yes"),
    ],
)
def test_a_variant_that_is_not_known_is_named_in_one_line(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    line = refused(tmp_path / "tiny", **change)
    assert named in line and "use one of these, or BF16" in line and "\n" not in line


@pytest.mark.parametrize(
    ("leaf", "broken", "named"),
    [
        ("scales", None, "has no scales beside it"),
        ("qzeros", None, "has no qzeros beside it"),
        ("scales", torch.ones(3, 5).half(), "is F16 of shape [3, 5], and its matrix needs [2, 128]"),
        ("scales", torch.ones(2, 128, dtype=torch.int32), "is I32 of shape [2, 128]"),
        ("qzeros", torch.ones(2, 4, dtype=torch.int32), "of shape [2, 4], and its matrix needs [2, 16] in I32"),
        ("qweight", torch.ones(16, 128), "is F32 of shape [16, 128]"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(tmp_path: Path, leaf: str, broken: torch.Tensor | None, named: str) -> None:
    directory = tmp_path / "GPTQ4-64"
    directory.mkdir()
    name = f"model.layers.1.self_attn.q_proj.{leaf}"

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[name]
        tensors.update({} if broken is None else {name: broken})

    with pytest.raises(UserError) as raised:
        spec_from_checkpoint(edit(made(directory, MADE["GPTQ4-64"]), damage))
    assert named in str(raised.value) and "download" in str(raised.value) and "\n" not in str(raised.value)


RECODED = {
    "GPTQ4-64": "INT4-64-asym",
    "GPTQ4-sym": "INT4-64",
    "GPTQ8-row": "INT8-row-asym",
    "GPTQ4-v2": "INT4-64-asym",
    "AWQ-32": "INT4-32-asym",
}
"""What a checkpoint has, and what `pack format=rows` makes of it."""
SYMMETRIC = Made("mixtral", F16, lambda m: whole(m, 4, 64, F16, True), lambda w: gptq(w, 4), GPTQ | {"sym": True})
SECOND = Made(
    "llama",
    BF16,
    lambda m: whole(m, 4, 64, F16),
    lambda w: gptq(w, 4) | {"qzeros": in_words(w.zero.t(), 4)},
    GPTQ | {"checkpoint_format": "gptq_v2"},
)
BYTES = Made("qwen3", BF16, lambda m: whole(m, 8, 0, F16), lambda w: gptq(w, 8), GPTQ | {"bits": 8, "group_size": -1})


@pytest.mark.parametrize("form", RECODED)
def test_gptq_and_awq_in_the_order_of_rows_give_the_same_logits(form: str, tmp_path: Path) -> None:
    how = MADE.get(form) or {"GPTQ4-sym": SYMMETRIC, "GPTQ8-row": BYTES, "GPTQ4-v2": SECOND}[form]
    sizes = SIZES if how.model_type != "mixtral" else {key: value for key, value in SIZES.items() if key != "head_dim"}
    (tmp_path / "made").mkdir()
    stored, out = made(tmp_path / "made", how, sizes), tmp_path / "rows"
    with opened(plan_for(stored, decisions()), stored) as session:
        want = logits_of(session, ROWS)
    pack_checkpoint(stored, out, None, False, lambda *_: None, form=PackFormat.rows)
    assert {unit.format.name for unit in spec_from_checkpoint(out).units} == {RECODED[form], str(how.dtype)[6:].upper().replace("LOAT", "")}
    assert verify_store(out, lambda *_: None)["nbytes"]
    with opened(plan_for(out, decisions()), out) as session:
        assert same(logits_of(session, ROWS), want)


@pytest.mark.parametrize("form", ["GPTQ4-64-order", "INT4-128"])
def test_what_has_no_order_to_mend_is_not_packed_so(form: str, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    stored = made(tmp_path / "made", MADE[form])
    said = "has named groups" if form.endswith("order") else "has INT4-128, allowed are GPTQ and AWQ; pack it without format="
    with pytest.raises(UserError, match=f"format=rows: .*{said}"):
        pack_checkpoint(stored, tmp_path / "rows", None, False, lambda *_: None, form=PackFormat.rows)

"""A plan before a download: what a config alone says is what transformers builds, and what the checkpoint's headers say."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import spec_from_checkpoint
from penstock.planner.contract.checkpoint.tally import TensorInfo
from penstock.planner.contract.checkpoint.tensor_names import classify
from penstock.planner.contract.config.resolve import model_from
from penstock.planner.contract.given.formats import FORMATS, QUANTISED
from penstock.planner.contract.published import meta_build
from penstock.planner.contract.published.families import KNOWN, formula_tensors
from penstock.planner.contract.published.model_source import spec_from_source
from penstock.runtime.model.described import describe
from tests.cli import command, refusal
from tests.planner.published_configs import SMALL, small
from tests.planner.test_presets import model

FILE_BYTES = {"gpt-oss-20b": 13_761_264_768, "gpt-oss-120b": 65_248_815_744}
"""total_size in the published model.safetensors.index.json."""


def write_config(directory: Path, config: Mapping[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def sizes(tensors: Mapping[str, TensorInfo]) -> Counter[tuple[str, int | None, str]]:
    """Bytes by kind, layer and dtype."""
    found: Counter[tuple[str, int | None, str]] = Counter()
    for name, info in tensors.items():
        role = classify(name)
        found[role.kind, role.layer, info.dtype] += info.nbytes
    return found


@pytest.mark.parametrize("name", SMALL)
def test_a_formula_counts_what_transformers_builds(tmp_path: Path, name: str) -> None:
    built = describe(write_config(tmp_path, small(name)))
    assert built["refused"] is None
    foretold = formula_tensors(small(name), 3)
    assert foretold is not None
    shapes = {key: TensorInfo.of(tuple(shape), FORMATS[as_stored(key, dtype)]) for key, shape, dtype in built["tensors"]}
    assert sizes(foretold) == sizes(shapes)


def as_stored(key: str, dtype: str) -> str:
    """`transformers` computes some routers in float32 from 5.24 on; files have them in BF16."""
    return "BF16" if key.endswith(".mlp.gate.weight") else dtype


def test_every_formula_is_tried() -> None:
    assert {config["model_type"] for config in SMALL.values()} == set(KNOWN) - {"kimi_k2"}, "Kimi K2 is DeepSeek V3 by another name"


@pytest.mark.parametrize("missing", ["hidden_size", "vocab_size", "intermediate_size", "torch_dtype"])
def test_a_size_that_the_config_leaves_out_is_left_to_transformers(missing: str) -> None:
    assert formula_tensors({key: value for key, value in small("llama").items() if key != missing}, 3) is None


@pytest.mark.parametrize("name", FILE_BYTES)
def test_mxfp4_takes_the_bytes_that_are_published(name: str) -> None:
    assert model_from(model(name)).weight_bytes == FILE_BYTES[name]


def test_fp8_takes_the_bytes_that_are_published() -> None:
    """DeepSeek-V3.1's files hold 688.6 GB: the model, and a layer of multi-token prediction with tables of its own."""
    whole = model_from(model("deepseek-v3.1"))
    e = whole.experts
    assert e is not None
    extra = whole.attn_bytes[-1] + whole.ffn_bytes[-1] + e.count * e.expert_bytes + 2 * whole.embed_bytes + 2 * 7168 * 7168 * 2
    assert round((whole.weight_bytes + extra) / 1e9, 1) == 688.6


def stored(name: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """A matrix as published checkpoints of the format ``name`` store it: names' ends and tensors."""
    rows, columns = shape
    if name == "FP8":
        scales = torch.zeros(-(-rows // 128), -(-columns // 128))
        return {".weight": torch.zeros(shape, dtype=torch.float8_e4m3fn), ".weight_scale_inv": scales}
    if name == "FP8-row":
        return {".weight": torch.zeros(shape, dtype=torch.float8_e4m3fn), ".weight_scale": torch.zeros(rows, 1)}
    if name == "INT4-32":
        scales = torch.zeros(rows, columns // 32, dtype=torch.bfloat16)
        return {".weight_packed": torch.zeros(rows, columns // 8, dtype=torch.int32), ".weight_scale": scales}
    if name == "AWQ-32":
        scales, zeros = torch.zeros(columns // 32, rows, dtype=torch.float16), torch.zeros(columns // 32, rows // 8, dtype=torch.int32)
        return {".qweight": torch.zeros(columns, rows // 8, dtype=torch.int32), ".scales": scales, ".qzeros": zeros}
    assert name == "GPTQ4-32"
    scales, zeros = torch.zeros(columns // 32, rows, dtype=torch.float16), torch.zeros(columns // 32, rows // 8, dtype=torch.int32)
    return {".qweight": torch.zeros(columns // 8, rows, dtype=torch.int32), ".scales": scales, ".qzeros": zeros}


METHODS: dict[str, dict[str, Any]] = {
    "FP8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "FP8-row": {"quant_method": "fbgemm_fp8"},
    "INT4-32": {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group", "symmetric": True}}},
        "ignore": ["lm_head", "re:.*self_attn.*"],
    },
    "AWQ-32": {"quant_method": "awq", "bits": 4, "group_size": 32, "modules_to_not_convert": ["down_proj"]},
    "GPTQ4-32": {"quant_method": "gptq", "bits": 4, "group_size": 32},
}
EXCLUDED = {"INT4-32": "self_attn", "AWQ-32": "down_proj"}


@pytest.mark.parametrize("name", METHODS)
def test_a_checkpoint_has_the_bytes_that_its_config_foretells(tmp_path: Path, name: str) -> None:
    config = small("llama", hidden_size=64, intermediate_size=128, attention_bias=False, mlp_bias=False, quantization_config=METHODS[name])
    directory = write_config(tmp_path / "tiny", config)
    before = spec_from_source(str(directory))
    plain = formula_tensors(config, 3)
    assert plain is not None and before.checkpoint is None
    assert {unit.format.name for unit in before.units} == {name, "BF16"}
    tensors: dict[str, torch.Tensor] = {}
    for key, info in plain.items():
        if len(info.shape) == 2 and ".layers." in key and EXCLUDED.get(name, "none") not in key:
            tensors |= {key.removesuffix(".weight") + end: part for end, part in stored(name, info.shape).items()}
        else:
            tensors[key] = torch.zeros(info.shape, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors")
    after = spec_from_checkpoint(directory)
    assert after.units == before.units and after.digest
    assert after.weight_bytes == sum(tensor.nbytes for tensor in tensors.values())
    assert after.weight_bytes < spec_from_source(str(write_config(tmp_path / "plain", config | {"quantization_config": None}))).weight_bytes


def test_the_experts_of_mxfp4_are_blocks_and_scales(tmp_path: Path) -> None:
    config = small("gpt_oss", quantization_config={"quant_method": "mxfp4"})
    directory = write_config(tmp_path / "tiny", config)
    before, tensors = spec_from_source(str(directory)), {}
    for key, info in (formula_tensors(config, 3) or {}).items():
        if key.endswith("_proj") and ".experts." in key:
            *outer, columns = info.shape
            tensors[f"{key}_blocks"] = torch.zeros(*outer, columns // 32, 16, dtype=torch.uint8)
            tensors[f"{key}_scales"] = torch.zeros(*outer, columns // 32, dtype=torch.uint8)
        else:
            tensors[key] = torch.zeros(info.shape, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors")
    assert spec_from_checkpoint(directory).units == before.units


REFUSED: dict[str, Any] = {
    "quant_method 'exl3' with bits 4.0, version 0.0.1": {"quant_method": "exl3", "version": "0.0.1", "bits": 4.0},
    "quant_method 'bitsandbytes'": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "quant_method 'torchao'": {"quant_method": "torchao", "quant_type": {"default": {}}},
    "quant_method 'quanto'": {"quant_method": "quanto", "weights": "int8"},
    "a quantization_config without quant_method, as MLX writes it, with bits 4, group_size 64": {"group_size": 64, "bits": 4},
    "quant_method 'fp8' with weight_block_size [64, 64]": {"quant_method": "fp8", "weight_block_size": [64, 64]},
    "quantization_config 'yes'": "yes",
    """quantization_config "['fp8']" """.strip(): ["fp8"],
}
"""What is said of a config -> its quantization_config."""


@pytest.mark.parametrize("said", REFUSED)
def test_a_quantisation_that_is_not_read_is_named_in_one_line_with_those_that_are(tmp_path: Path, said: str) -> None:
    directory = write_config(tmp_path, small("llama", quantization_config=REFUSED[said]))
    with pytest.raises(UserError) as told:
        spec_from_source(str(directory))
    text = str(told.value)
    assert said in text and "is not read; read are fp8 in blocks of 128 x 128" in text and "\n" not in text


def test_a_config_json_may_be_named_itself(tmp_path: Path) -> None:
    directory = write_config(tmp_path / "some-model", small("qwen3"))
    spec = spec_from_source(str(directory / "config.json"))
    assert (spec.name, spec.checkpoint, spec.digest, spec.layers) == ("some-model", None, None, 3)


def test_a_wrappers_text_model_is_planned(tmp_path: Path) -> None:
    text = small("gemma3")
    wrapper = write_config(
        tmp_path / "wrapper", {"model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text, "vision_config": {}}
    )
    assert spec_from_source(str(wrapper)).units == spec_from_source(str(write_config(tmp_path / "text", text))).units


def test_an_unknown_family_is_built_once_by_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    config = {key: value for key, value in small("llama").items() if key not in ("head_dim", "torch_dtype")} | {"model_type": "phi3"}
    directory = write_config(tmp_path / "phi", config | {"dtype": "bfloat16", "num_key_value_heads": 2})
    first = spec_from_source(str(directory))
    assert first.layers == 3 and first.ffn_bytes[0] == 2 * 3 * 64 * 96
    monkeypatch.setattr(meta_build, "BUILDER", "no.such.module")
    assert spec_from_source(str(directory)) == first
    with pytest.raises(UserError, match="transformers could not build the model: .*No module named 'no'"):
        spec_from_source(str(write_config(tmp_path / "other", config | {"hidden_size": 128})))


def test_formats_are_told_apart_by_their_names() -> None:
    assert all(form.name == name and form.stored_bytes(256, 256) < 2 * 256 * 256 for name, form in QUANTISED.items())


def test_model_hf_follows_from_a_coded_checkpoint(tmp_path: Path) -> None:
    write_config(tmp_path / "tiny", small("gpt_oss", quantization_config={"quant_method": "mxfp4"}))
    done = command(
        "planner", "solve", "hardware=cpu", "model.checkpoint=tiny", "workload.prompt_tokens=16", "workload.new_tokens=4", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "format: MXFP4" in (tmp_path / "plan.yaml").read_text()


@pytest.mark.parametrize(
    "word, says",
    [
        ("hardware=rtx6090", "no such hardware; .* or run `planner probe` on the machine itself for hardware=local; did you mean"),
        (
            "model=gpt-oss-2b",
            "no such model; .* or plan for any other by model=hf model.checkpoint=DIR or ORG/NAME; did you mean gpt",
        ),
        ("workload.batch=1.5", r"workload\.batch=1\.5: must be a whole number"),
    ],
)
def test_what_is_no_preset_or_no_number_is_told_what_serves(tmp_path: Path, word: str, says: str) -> None:
    rest = [other for other in ("hardware=cpu", "model=demo") if other.partition("=")[0] != word.partition("=")[0]]
    assert re.search(says, refusal("planner", "solve", *rest, word, cwd=tmp_path))

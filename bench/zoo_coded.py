"""Quantised checkpoints for bench/zoo.py: tiny models whose matrices are stored as published ones are, by hand, tensor by tensor.

Those of methods that no run knows have the tensors' names and the config of a published file: they are refused by these.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bench.zoo_models import Case, cases

Leaves = dict[str, torch.Tensor]
Coder = Callable[[torch.Tensor], Leaves]
"""A matrix [rows, columns] as its stored parts, by the ends of their names."""
LINEAR = re.compile(r"layers\.\d+\.(?:self_attn|mlp)\.(?:.*\.)?\w+_proj\.weight$")
EXPERTS = re.compile(r"experts\.(?:gate_up|down)_proj$")
WEIGHTS, GGUF = "model.safetensors", "model-Q8_0.gguf"
GROUP = 128


@dataclass(frozen=True)
class CodedCase(Case):
    """``coder`` stores the layers' matrices, ``said`` is the quantization_config; ``reference`` loads the decoded model in transformers."""

    coder: Coder | None = None
    said: Mapping[str, Any] = field(default_factory=dict)
    reference: Callable[[], Mapping[str, Any]] | None = None
    """Arguments of ``from_pretrained``; None where transformers has no decoder."""
    refused: str = ""
    """What the refusal names; empty for what runs."""

    @property
    def loaded(self) -> Mapping[str, Any] | None:
        return None if self.reference is None else self.reference()

    def save(self, directory: Path) -> None:
        super().save(directory)
        tensors = _read(directory)
        for name in [name for name, tensor in tensors.items() if self.coder and LINEAR.search(name) and tensor.dim() == 2]:
            assert self.coder is not None
            matrix, base = tensors.pop(name), name.removesuffix("weight")
            tensors |= {base + leaf: part.contiguous() for leaf, part in self.coder(matrix).items()}
        self._finish(directory, tensors)

    def _finish(self, directory: Path, tensors: Leaves) -> None:
        _write(directory, tensors)
        if self.said:
            _say(directory, quantization_config=dict(self.said))


class MxfpCase(CodedCase):
    """gpt-oss as published: experts in blocks and scales of random bits."""

    def _finish(self, directory: Path, tensors: Leaves) -> None:
        for name in [name for name in tensors if EXPERTS.search(name)]:
            count, columns, rows = tensors.pop(name).shape
            tensors[f"{name}_blocks"] = torch.randint(0, 255, (count, rows, columns // 32, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full((count, rows, columns // 32), 122, dtype=torch.uint8)
        super()._finish(directory, tensors)


@dataclass(frozen=True)
class GgufCase(CodedCase):
    """Q8_0 in a GGUF file, made by the `gguf` package."""

    keeps_config: bool = False
    is_file: bool = False
    """Whether the file itself is what is planned for."""

    def source(self, directory: Path) -> Path:
        return directory / GGUF if self.is_file else directory

    def _finish(self, directory: Path, tensors: Leaves) -> None:
        _write_gguf(directory, tensors)
        (directory / WEIGHTS).unlink()
        for name in () if self.keeps_config else ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            (directory / name).unlink(missing_ok=True)


def _read(directory: Path) -> Leaves:
    from safetensors.torch import load_file

    return load_file(directory / WEIGHTS)


def _write(directory: Path, tensors: Leaves) -> None:
    from safetensors.torch import save_file

    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / WEIGHTS, metadata={"format": "pt"})


def _say(directory: Path, **keys: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def _write_gguf(directory: Path, tensors: Leaves) -> None:
    import gguf

    config, words = (json.loads((directory / name).read_text()) for name in ("config.json", "tokenizer.json"))
    file, head = gguf.GGUFWriter(directory / GGUF, "llama"), config["head_dim"]
    file.add_context_length(config["max_position_embeddings"])
    file.add_embedding_length(config["hidden_size"])
    file.add_block_count(config["num_hidden_layers"])
    file.add_feed_forward_length(config["intermediate_size"])
    file.add_head_count(config["num_attention_heads"])
    file.add_head_count_kv(config["num_key_value_heads"])
    file.add_layer_norm_rms_eps(config["rms_norm_eps"])
    file.add_rope_dimension_count(head)
    file.add_vocab_size(config["vocab_size"])
    file.add_key_length(head)
    file.add_value_length(head)
    file.add_tokenizer_model("gpt2")
    known = words["model"]["vocab"]
    spare = config["vocab_size"] - len(known) - 1
    file.add_token_list([*sorted(known, key=known.get), "qz", *(f"<unused{n}>" for n in range(spare))])
    file.add_token_merges(["q z"])
    for name, tensor in tensors.items():
        array = tensor.float().numpy()
        if tensor.dim() == 2:
            packed = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            file.add_tensor(_gguf_name(name), packed, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            file.add_tensor(_gguf_name(name), array)
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


_NAMES = {
    "model.layers.": "blk.", "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip


def _gguf_name(name: str) -> str:
    for ours, theirs in _NAMES.items():
        name = name.replace(ours, theirs)
    return name


def fp8(matrix: torch.Tensor) -> Leaves:
    """Blocks of 128 x 128."""
    rows, columns = matrix.shape
    scales, coded = torch.empty(-(-rows // 128), -(-columns // 128)), torch.empty(matrix.shape, dtype=torch.float8_e4m3fn)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128)
            scales[i, j] = matrix[at].float().abs().max() / 448
            coded[at] = (matrix[at].float() / scales[i, j]).to(torch.float8_e4m3fn)
    return {"weight": coded, "weight_scale_inv": scales}


def w4a16(matrix: torch.Tensor) -> Leaves:
    groups = matrix.float().view(matrix.shape[0], -1, GROUP)
    scales = groups.abs().amax(-1, keepdim=True) / 7.5
    numbers = (torch.round(groups / scales).clamp(-8, 7) + 8).to(torch.int64).view(matrix.shape[0], -1, 8)
    packed = sum(numbers[..., i] << (4 * i) for i in range(8))
    packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
    return {"weight_packed": packed, "weight_scale": scales.squeeze(-1).to(matrix.dtype), "weight_shape": torch.tensor(list(matrix.shape))}


def int8(matrix: torch.Tensor) -> Leaves:
    scales = matrix.float().abs().amax(1, keepdim=True) / 127
    return {"weight": torch.round(matrix.float() / scales).to(torch.int8), "weight_scale": scales.to(matrix.dtype)}


def fp8_rows(matrix: torch.Tensor) -> Leaves:
    scales = matrix.float().abs().amax(1, keepdim=True) / 448
    return {"weight": (matrix.float() / scales).to(torch.float8_e4m3fn), "weight_scale": scales.to(matrix.dtype)}


def nvfp4(matrix: torch.Tensor) -> Leaves:
    """compressed-tensors; random bits."""
    rows, columns = matrix.shape
    packed = torch.randint(0, 255, (rows, columns // 2), dtype=torch.uint8)
    return {"weight_packed": packed, "weight_scale": _ones_fp8(rows, columns), "weight_global_scale": torch.full((1,), 20.0)}


def modelopt(matrix: torch.Tensor) -> Leaves:
    """NVFP4 by ModelOpt; random bits."""
    rows, columns = matrix.shape
    packed = torch.randint(0, 255, (rows, columns // 2), dtype=torch.uint8)
    scales = {"weight_scale": _ones_fp8(rows, columns), "weight_scale_2": torch.tensor(0.05), "input_scale": torch.tensor(1.0)}
    return {"weight": packed, **scales}


def _ones_fp8(rows: int, columns: int) -> torch.Tensor:
    return torch.ones(rows, columns // 16).to(torch.float8_e4m3fn)


def _bits(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, (rows, columns), dtype=torch.int32)


def awq(matrix: torch.Tensor) -> Leaves:
    """Random bits."""
    rows, columns = matrix.shape
    scales = torch.full((columns // GROUP, rows), 0.01, dtype=matrix.dtype)
    return {"qweight": _bits(columns, rows // 8), "qzeros": _bits(columns // GROUP, rows // 8), "scales": scales}


def gptq(matrix: torch.Tensor) -> Leaves:
    """Random bits."""
    rows, columns = matrix.shape
    scales = torch.full((columns // GROUP, rows), 0.01, dtype=matrix.dtype)
    zeros = torch.full((columns // GROUP, rows // 8), 0x77777777, dtype=torch.int32)
    order = (torch.arange(columns) // GROUP).to(torch.int32)
    return {"qweight": _bits(columns // 8, rows), "qzeros": zeros, "scales": scales, "g_idx": order}


def mlx(matrix: torch.Tensor) -> Leaves:
    rows, columns = matrix.shape
    scales = torch.ones(rows, columns // 64, dtype=matrix.dtype)
    return {"weight": _bits(rows, columns // 8).view(torch.uint32), "scales": scales, "biases": torch.zeros_like(scales)}


def exl3(matrix: torch.Tensor) -> Leaves:
    rows, columns = matrix.shape
    return {"trellis": torch.zeros(columns // 16, rows // 16, 64, dtype=torch.int16), "suh": matrix[0].half(), "svh": matrix[:, 0].half()}


def bnb4(matrix: torch.Tensor) -> Leaves:
    return {
        "weight": torch.zeros(matrix.numel() // 2, 1, dtype=torch.uint8),
        "weight.absmax": torch.zeros(matrix.numel() // 64, dtype=torch.uint8),
        "weight.quant_map": torch.zeros(16),
        "weight.quant_state.bitsandbytes__nf4": torch.zeros(90, dtype=torch.uint8),
    }


def bnb8(matrix: torch.Tensor) -> Leaves:
    return {"weight": matrix.to(torch.int8), "SCB": torch.ones(matrix.shape[0])}


def quanto(matrix: torch.Tensor) -> Leaves:
    return {"weight._data": matrix.to(torch.int8), "weight._scale": torch.ones(matrix.shape[0], 1)}


def compressed(form: str, inputs: Mapping[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    scheme = {"actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8, "observer": "minmax"}
    scheme |= {"strategy": "channel", "symmetric": True, "type": "int"} | weights
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": inputs, "output_activations": None, "format": form}
    known = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "kv_cache_scheme": None, "ignore": ["lm_head"]}
    return known | {"format": form, "config_groups": {"group_0": group}}


def _inputs(kind: str) -> dict[str, Any]:
    return {"num_bits": 8, "type": kind, "dynamic": True, "strategy": "token", "symmetric": True}


def _dequantized_fp8() -> Mapping[str, Any]:
    from transformers import FineGrainedFP8Config

    return {"quantization_config": FineGrainedFP8Config(dequantize=True)}


def _dequantized_mxfp4() -> Mapping[str, Any]:
    from transformers import Mxfp4Config

    return {"quantization_config": Mxfp4Config(dequantize=True)}


def _decompressed() -> Mapping[str, Any]:
    from transformers.utils.quantization_config import CompressedTensorsConfig

    return {"quantization_config": CompressedTensorsConfig(run_compressed=False)}


def _of_gguf() -> Mapping[str, Any]:
    return {"gguf_file": GGUF}


FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
HEAD_APART = FP8 | {"modules_to_not_convert": ["lm_head"]}
W4 = compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP)
W8A8 = compressed("int-quantized", _inputs("int"))
NVFP4 = compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "config_groups": {}, "producer": {"name": "modelopt"}}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": GROUP, "sym": True, "packing_format": "auto_round:auto_gptq"}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
}
BNB4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def coded_cases() -> list[CodedCase]:
    """The 22 quantised cases: 16 that run, and six of methods that are refused."""
    sizes = {case.name: case.sizes for case in cases()}
    qwen, moe, deepseek = sizes["Qwen3"], {**sizes["Qwen3-MoE"], "moe_intermediate_size": 128}, {**sizes["DeepSeek-V3 (BF16)"]}
    # of 192 rows with two rows of scales transformers makes blocks of 96: its reference needs whole blocks
    deepseek |= {"moe_intermediate_size": 128, "qk_rope_head_dim": 32}
    oss, llama = sizes["gpt-oss (BF16)"], {**sizes["Llama 2"], "head_dim": 32}

    def made(name: str, of: Mapping[str, Any], *how: Any, **more: Any) -> CodedCase:
        return CodedCase(name, "quantised", of, "", "", *how, **more)

    def gguf(name: str, **how: Any) -> CodedCase:
        return GgufCase(name, "quantised", llama, reference=_of_gguf, **how)

    tools = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}}}}
    return [
        made("FP8 block (Qwen3-8B-FP8)", qwen, fp8, HEAD_APART, _dequantized_fp8),
        made("FP8 block MoE (Qwen3-30B-A3B-FP8)", moe, fp8, HEAD_APART, _dequantized_fp8),
        made("FP8 DeepSeek-V3/R1, Kimi-K2 (as published)", deepseek, fp8, FP8, _dequantized_fp8),
        made("compressed-tensors W4A16 (pack-quantized)", qwen, w4a16, W4, _decompressed),
        made("compressed-tensors W8A8 INT8 (int-quantized)", qwen, int8, W8A8, _decompressed),
        made("compressed-tensors W8 INT8, weights alone", qwen, int8, compressed("int-quantized"), _decompressed),
        made(
            "compressed-tensors FP8-dynamic (float-quantized)",
            qwen,
            fp8_rows,
            compressed("float-quantized", _inputs("float"), type="float"),
            _decompressed,
        ),
        made("compressed-tensors NVFP4", qwen, nvfp4, NVFP4),
        made("ModelOpt NVFP4 (nvidia/*-FP4)", qwen, modelopt, MODELOPT),
        made("AWQ 4-bit (gemm)", qwen, awq, AWQ),
        made("GPTQ 4-bit", qwen, gptq, GPTQ),
        made("AutoRound 4-bit (GPTQ packing)", qwen, gptq, ROUND),
        MxfpCase("gpt-oss MXFP4 (as published)", "quantised", oss, said=MXFP4, reference=_dequantized_mxfp4),
        gguf("GGUF directory (only *.gguf)"),
        gguf("GGUF file given as model.checkpoint", is_file=True),
        gguf("GGUF with config.json beside it", keeps_config=True),
        made("MLX 4-bit (mlx-community)", qwen, mlx, {"group_size": 64, "bits": 4}, refused="MLX|mlx"),
        made("EXL3 (exllamav3)", qwen, exl3, {"quant_method": "exl3", "version": "0.0.1", "bits": 4.0, "head_bits": 6}, refused="exl3"),
        made("bitsandbytes NF4 (unsloth/*-bnb-4bit)", qwen, bnb4, BNB4, refused="bitsandbytes"),
        made("bitsandbytes INT8", qwen, bnb8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, refused="bitsandbytes"),
        made("torchao int8 weight-only", qwen, quanto, tools, refused="torchao"),
        made("quanto int8", qwen, quanto, {"quant_method": "quanto", "weights": "int8"}, refused="quanto"),
    ]

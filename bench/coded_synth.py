"""Checkpoints of random coded weights with a dense preset's geometry, written as they are published: no BF16 is made first.

    python bench/coded_synth.py format=int4 out=DIR [model=llama8b] [layers=N]

Formats: `fp8` (blocks of 128 x 128), `int4` (compressed-tensors, groups of 128), `int8` (compressed-tensors, rows), `gptq`, `awq`, `nvfp4`,
`q4_k` (one GGUF file with config.json beside it, the LM head in Q6_K). Every weight has a standard deviation of about 0.02. The disk sets
the speed; memory: a few pools of 32 MB that all tensors are cut from.
"""

from __future__ import annotations

import json
import math
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.gguf_file import GGUF_TYPES, Value, write_gguf_file  # noqa: E402
from bench.keys import given_of  # noqa: E402
from bench.zoo_models import save_tokenizer  # noqa: E402
from penstock.planner.common.strictly import build  # noqa: E402
from penstock.planner.contract.config.config_schema import ModelConfig  # noqa: E402
from penstock.planner.contract.config.geometry import hf_config_dict  # noqa: E402

POOL_BYTES = 32 << 20
DEVIATION = 0.02
F16_DEVIATION = DEVIATION / 4
"""All matrices have the same bits, so that their products add up over the layers: beyond F16's largest number else."""
GROUP = 128
SHARD_BYTES = 2**31
Fill = Callable[[], bytes | memoryview]
"""Bytes that a tensor's are cut from, again and again."""


def _random(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@cache
def bits() -> bytes:
    return _random().bytes(POOL_BYTES)


@cache
def normal_bf16() -> bytes:
    numbers = _random().standard_normal(POOL_BYTES // 2, np.float32) * np.float32(DEVIATION)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()


@cache
def normal_fp8() -> bytes:
    """E4M3, of deviation 100: a scale of 2e-4 makes it 0.02."""
    import torch

    return torch.randn(POOL_BYTES // 4).mul_(100).clamp_(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes()


@cache
def q4_k() -> bytes:
    """Blocks of 144 bytes: d and dmin, 12 bytes of scales and minima, 256 weights. w = d * scale * q - dmin * minimum."""
    d = DEVIATION / 170
    return _blocks(144, {0: np.float16(d), 2: np.float16(7.5 * d)})


@cache
def q4_0() -> bytes:
    """Blocks of 18 bytes: d, 32 weights. w = d * (q - 8)."""
    return _blocks(18, {0: np.float16(DEVIATION / 4.6)})


@cache
def q6_k() -> bytes:
    """Blocks of 210 bytes, d at their end. w = d * scale * (q - 32)."""
    return _blocks(210, {208: np.float16(DEVIATION / 1370)})


def _blocks(nbytes: int, fixed: Mapping[int, np.float16]) -> bytes:
    blocks = _random().integers(0, 256, (POOL_BYTES // nbytes, nbytes), np.uint8)
    for at, value in fixed.items():
        blocks[:, at : at + 2] = np.frombuffer(value.tobytes(), np.uint8)
    return blocks.tobytes()


def same(value: bytes) -> Fill:
    """One element, repeated."""
    return lambda: value * (4096 // len(value))


def from_somewhere(pool: Fill, name: str, block_bytes: int = 2) -> Fill:
    """``pool`` from a block on that ``name`` gives, so that tensors differ."""
    return lambda: memoryview(pool())[zlib.crc32(name.encode()) % (POOL_BYTES // 2 // block_bytes) * block_bytes :]


def bf16(value: float) -> bytes:
    return struct.pack("<f", value)[2:]


ONES = same(bf16(1.0))


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    dtype: str
    """As the file names it: of safetensors, or a type of GGUF."""
    nbytes: int
    fill: Fill

    def pieces(self) -> Iterator[memoryview]:
        pool, left = memoryview(self.fill()), self.nbytes
        while left:
            yield pool[:left]
            left -= min(left, len(pool))


WIDTHS = {"U8": 1, "I8": 1, "F8_E4M3": 1, "BF16": 2, "F16": 2, "I32": 4, "F32": 4, "I64": 8}


def tensor(name: str, shape: Sequence[int], dtype: str, fill: Fill) -> Tensor:
    return Tensor(name, tuple(shape), dtype, math.prod(shape) * WIDTHS[dtype], fill)


@dataclass(frozen=True)
class Recipe:
    """How a method stores one matrix [rows, columns] under the name ``stem``, and what config.json says of it."""

    leaves: Callable[[str, int, int], Iterable[Tensor]]
    said: Mapping[str, Any]


def _fp8(stem: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield tensor(f"{stem}.weight", (rows, columns), "F8_E4M3", normal_fp8)
    yield tensor(f"{stem}.weight_scale_inv", (-(-rows // 128), -(-columns // 128)), "F32", same(struct.pack("<f", DEVIATION / 100)))


def _int4(stem: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield tensor(f"{stem}.weight_packed", (rows, columns // 8), "I32", bits)
    yield tensor(f"{stem}.weight_scale", (rows, columns // GROUP), "BF16", same(bf16(DEVIATION / 4.6)))
    yield Tensor(f"{stem}.weight_shape", (2,), "I64", 16, lambda: struct.pack("<qq", rows, columns))


def _int8(stem: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield tensor(f"{stem}.weight", (rows, columns), "I8", bits)
    yield tensor(f"{stem}.weight_scale", (rows, 1), "BF16", same(bf16(DEVIATION / 74)))


def _gptq(stem: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield tensor(f"{stem}.qweight", (columns // 8, rows), "I32", bits)
    yield tensor(f"{stem}.qzeros", (columns // GROUP, rows // 8), "I32", same(b"\x77" * 4))
    yield tensor(f"{stem}.scales", (columns // GROUP, rows), "F16", same(np.float16(F16_DEVIATION / 4.6).tobytes()))
    yield Tensor(f"{stem}.g_idx", (columns,), "I32", 4 * columns, lambda: (np.arange(columns) // GROUP).astype("<i4").tobytes())


def _awq(stem: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield tensor(f"{stem}.qweight", (columns, rows // 8), "I32", bits)
    yield tensor(f"{stem}.qzeros", (columns // GROUP, rows // 8), "I32", same(b"\x88" * 4))
    yield tensor(f"{stem}.scales", (columns // GROUP, rows), "F16", same(np.float16(F16_DEVIATION / 4.6).tobytes()))


def _nvfp4(stem: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield tensor(f"{stem}.weight_packed", (rows, columns // 2), "U8", bits)
    yield tensor(f"{stem}.weight_scale", (rows, columns // 16), "F8_E4M3", same(b"\x38"))
    yield tensor(f"{stem}.weight_global_scale", (1,), "F32", same(struct.pack("<f", 3 / DEVIATION)))


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    scheme = {
        "symmetric": True,
        "dynamic": False,
        "group_size": None,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
    } | weights
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None, "format": form}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


RECIPES: Mapping[str, Recipe] = {
    "fp8": Recipe(
        _fp8,
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["lm_head"],
        },
    ),
    "int4": Recipe(_int4, _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP)),
    "int8": Recipe(_int8, _compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    "gptq": Recipe(
        _gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
    ),
    "awq": Recipe(_awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}),
    "nvfp4": Recipe(_nvfp4, _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)),
}
FORMATS = (*RECIPES, "q4_k")


def config_of(preset: str, layers: int | None) -> dict[str, Any]:
    """config.json of a dense preset."""
    text = (ROOT / "conf" / "model" / f"{preset}.yaml").read_text(encoding="utf-8")
    model = build(ModelConfig, {key: value for key, value in yaml.safe_load(text).items() if key != "defaults"}, "model")
    if layers is not None:
        model.layers = layers
    return hf_config_dict(model)


def matrices(config: Mapping[str, Any]) -> Iterator[tuple[str, int, int]]:
    """(stem, rows, columns) of one layer."""
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    yield from (("self_attn.q_proj", q, hidden), ("self_attn.k_proj", kv, hidden), ("self_attn.v_proj", kv, hidden))
    yield from (
        ("self_attn.o_proj", hidden, q),
        ("mlp.gate_proj", ffn, hidden),
        ("mlp.up_proj", ffn, hidden),
        ("mlp.down_proj", hidden, ffn),
    )


def tensors(config: Mapping[str, Any], recipe: Recipe) -> Iterator[Tensor]:
    """Of the checkpoint, in the model's order."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    yield tensor("model.embed_tokens.weight", (vocab, hidden), "BF16", normal_bf16)
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}"
        for name, rows, columns in matrices(config):
            yield from recipe.leaves(f"{stem}.{name}", rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield tensor(f"{stem}.{norm}.weight", (hidden,), "BF16", ONES)
    yield tensor("model.norm.weight", (hidden,), "BF16", ONES)
    yield tensor("lm_head.weight", (vocab, hidden), "BF16", normal_bf16)


def write_coded(form: str, config: Mapping[str, Any], out: Path) -> None:
    """The checkpoint ``out``, a new directory."""
    out.mkdir(parents=True)
    dtype = "float16" if form in ("gptq", "awq") else "bfloat16"
    if form == "q4_k":
        write_gguf(out / "model.gguf", config)
        (out / "config.json").write_text(json.dumps(dict(config), indent=1))
        save_tokenizer(out)
        return
    recipe = RECIPES[form]
    shards: list[list[Tensor]] = [[]]
    for one in tensors(config, recipe):
        if sum(t.nbytes for t in shards[-1]) > SHARD_BYTES:
            shards.append([])
        shards[-1].append(_in_f16(one) if dtype == "float16" else one)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write_shard, [out / name for name in names], shards))
    index = {one.name: name for name, shard in zip(names, shards, strict=True) for one in shard}
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (out / "config.json").write_text(json.dumps({**config, "dtype": dtype, "quantization_config": recipe.said}, indent=1))


def _in_f16(one: Tensor) -> Tensor:
    """AWQ and GPTQ publish what they do not quantise in F16."""
    if one.dtype != "BF16":
        return one
    fill = same(np.float16(1).tobytes()) if one.fill is ONES else normal_f16
    return Tensor(one.name, one.shape, "F16", one.nbytes, fill)


@cache
def normal_f16() -> bytes:
    return (_random().standard_normal(POOL_BYTES // 2, np.float32) * np.float32(DEVIATION)).astype(np.float16).tobytes()


def write_shard(path: Path, shard: Sequence[Tensor]) -> None:
    """One file of safetensors, laid out as the library does."""
    ordered, header, end = sorted(shard, key=lambda t: (-WIDTHS[t.dtype], t.name)), {}, 0
    for one in ordered:
        header[one.name] = {"dtype": one.dtype, "shape": list(one.shape), "data_offsets": [end, end + one.nbytes]}
        end += one.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for one in ordered:
            _put(file.fileno(), one)


def _put(fd: int, one: Tensor) -> None:
    for piece in one.pieces():
        while piece:
            piece = piece[os.write(fd, piece) :]


GGUF_FILLS: Mapping[str, Fill] = {"Q4_0": q4_0, "Q4_K": q4_k, "Q6_K": q6_k, "BF16": normal_bf16}
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_tensor(name: str, shape: tuple[int, ...], kind: str, fill: Fill) -> Tensor:
    _, elements, nbytes = GGUF_TYPES[kind]
    return Tensor(name, shape, kind, math.prod(shape) // elements * nbytes, fill)


def gguf_matrix(name: str, shape: tuple[int, ...], kind: str) -> Tensor:
    return gguf_tensor(name, shape, kind, from_somewhere(GGUF_FILLS[kind], name, GGUF_TYPES[kind][2]))


def gguf_tensors(config: Mapping[str, Any], stored: str, head: str) -> Iterator[Tensor]:
    """Of the file, in its order: matrices as ``stored``, the LM head as ``head``."""
    hidden, vocab, ones = config["hidden_size"], config["vocab_size"], same(struct.pack("<f", 1.0))
    yield gguf_matrix("token_embd.weight", (vocab, hidden), stored)
    for layer in range(config["num_hidden_layers"]):
        for name, rows, columns in matrices(config):
            yield gguf_matrix(f"blk.{layer}.{GGUF_NAMES[name]}.weight", (rows, columns), stored)
        for norm in ("attn_norm", "ffn_norm"):
            yield gguf_tensor(f"blk.{layer}.{norm}.weight", (hidden,), "F32", ones)
    yield gguf_tensor("output_norm.weight", (hidden,), "F32", ones)
    yield gguf_matrix("output.weight", (vocab, hidden), head)


def write_gguf(
    path: Path, config: Mapping[str, Any], stored: str = "Q4_K", head_stored: str = "Q6_K", texts: Mapping[str, str] | None = None
) -> None:
    """One file of a Llama: its figures and ``texts``."""
    said = {"general.architecture": "llama", **gguf_figures("llama", config), "general.file_type": 15, **(texts or {})}
    write_gguf_file(path, said, list(gguf_tensors(config, stored, head_stored)))


def gguf_figures(architecture: str, config: Mapping[str, Any]) -> dict[str, Value]:
    """Of the metadata: what every decoder has."""
    head = config["head_dim"]
    theta = (config.get("rope_parameters") or config).get("rope_theta", 10000.0)
    figures: dict[str, Value] = {
        "block_count": config["num_hidden_layers"], "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"], "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"], "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head, "attention.value_length": head, "rope.dimension_count": head, "vocab_size": config["vocab_size"],
        "attention.layer_norm_rms_epsilon": float(config.get("rms_norm_eps", 1e-5)), "rope.freq_base": float(theta),
    }  # fmt: skip
    return {f"{architecture}.{name}": value for name, value in figures.items()}


def main() -> None:
    given = given_of(sys.argv[1:], ("format", "out", "model", "layers"))
    if given.get("format") not in FORMATS or "out" not in given:
        raise SystemExit(f"format={given.get('format')}, out={given.get('out')}: give a new directory and one of {', '.join(FORMATS)}")
    layers = int(given["layers"]) if "layers" in given else None
    write_coded(given["format"], config_of(given.get("model", "llama8b"), layers), Path(given["out"]))


if __name__ == "__main__":
    main()

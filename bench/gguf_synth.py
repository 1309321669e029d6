"""GGUF files of random weights with a published geometry, for llama.cpp: dense Llamas, Mixtral, gpt-oss.

    python bench/gguf_synth.py out=FILE [model=llama8b] [layers=N] [format=BF16] [head=Q6_K] [hidden=N] [experts=N] [vocab=N]

`model=mixtral8x7b` has experts in BF16, `gpt-oss-120b` in MXFP4; all else is BF16, routers, norms and biases F32, as llama.cpp's own
conversion leaves them. `hidden`, `experts` and `vocab` change gpt-oss alone. Threads write: 16 GB into memory take seconds.
The vocabulary has a word for each token, one letter for each of the first 256: servers may load the file.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.coded_synth import (  # noqa: E402
    DEVIATION,
    GGUF_FILLS,
    POOL_BYTES,
    Tensor,
    config_of,
    from_somewhere,
    gguf_figures,
    gguf_matrix,
    gguf_tensor,
    gguf_tensors,
    same,
)
from bench.gguf_file import Value, write_gguf_file  # noqa: E402
from bench.gpt_oss_synth import KEYS, SCALE, gpt_oss_config, wide_bf16  # noqa: E402
from bench.keys import given_of  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402

F32_ONES = same(struct.pack("<f", 1.0))
MXFP4_BYTES = 17
"""Of a block: an exponent, 32 weights."""


@dataclass(frozen=True)
class GgufModel:
    """What a file holds."""

    architecture: str
    figures: Mapping[str, Value]
    tensors: Sequence[Tensor]
    layers: int
    experts: int = 0
    top_k: int = 0

    @cached_property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.tensors)

    @property
    def vocab(self) -> int:
        return self.tensors[0].shape[0]

    @property
    def largest_bytes(self) -> int:
        return max(one.nbytes for one in self.tensors)

    @property
    def kv_width(self) -> int:
        """Numbers of K and V that a token adds to a layer."""
        return sum(one.shape[0] for one in self.tensors if one.name in ("blk.0.attn_k.weight", "blk.0.attn_v.weight"))

    def write(self, path: Path) -> None:
        said = {"general.architecture": self.architecture, **self.figures, **vocabulary(self.vocab)}
        write_gguf_file(path, said, self.tensors)


def vocabulary(count: int) -> dict[str, Value]:
    """GPT-2's letters of bytes, then a word for each token; no two are joined."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(b) for b in printed] + [chr(256 + k) for k in range(256 - len(printed))]
    words = [*letters[:count], *(f"w{k}" for k in range(256, count))]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": words, "tokenizer.ggml.merges": []}


def dense_gguf(config: Mapping[str, Any], stored: str = "BF16", head: str = "BF16") -> GgufModel:
    """Matrices as ``stored``, the LM head as ``head``."""
    return GgufModel("llama", gguf_figures("llama", config), tuple(gguf_tensors(config, stored, head)), config["num_hidden_layers"])


def mixtral_gguf(config: Mapping[str, Any]) -> GgufModel:
    """A Llama with experts in BF16."""
    experts, top_k = config["num_local_experts"], config["num_experts_per_tok"]
    figures = gguf_figures("llama", config) | {"llama.expert_count": experts, "llama.expert_used_count": top_k}
    return GgufModel("llama", figures, tuple(_mixtral(config)), config["num_hidden_layers"], experts, top_k)


def _mixtral(config: Mapping[str, Any]) -> Iterator[Tensor]:
    hidden, ffn, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    yield _plain("token_embd.weight", config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        stem = f"blk.{layer}"
        yield from _attention(stem, config)
        yield _f32(f"{stem}.ffn_gate_inp.weight", experts, hidden)
        for name, rows, columns in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
            yield _plain(f"{stem}.ffn_{name}_exps.weight", experts, rows, columns)
        for norm in ("attn_norm", "ffn_norm"):
            yield gguf_tensor(f"{stem}.{norm}.weight", (hidden,), "F32", F32_ONES)
    yield from _end(config)


def gpt_oss_gguf(config: Mapping[str, Any]) -> GgufModel:
    """Experts in MXFP4."""
    experts, top_k = config["num_local_experts"], config["num_experts_per_tok"]
    figures = gguf_figures("gpt-oss", {"rope_theta": 150000.0, **config}) | {
        "gpt-oss.expert_count": experts,
        "gpt-oss.expert_used_count": top_k,
        "gpt-oss.expert_feed_forward_length": config["intermediate_size"],
        "gpt-oss.attention.sliding_window": config["sliding_window"],
    }
    return GgufModel("gpt-oss", figures, tuple(_gpt_oss(config)), config["num_hidden_layers"], experts, top_k)


def _gpt_oss(config: Mapping[str, Any]) -> Iterator[Tensor]:
    hidden, ffn, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    yield gguf_tensor("token_embd.weight", (config["vocab_size"], hidden), "BF16", wide_bf16)
    for layer in range(config["num_hidden_layers"]):
        stem = f"blk.{layer}"
        for one in _attention(stem, config):
            yield one
            yield _f32(one.name.replace(".weight", ".bias"), one.shape[0])
        yield _f32(f"{stem}.attn_sinks.weight", config["num_attention_heads"])
        yield _f32(f"{stem}.ffn_gate_inp.weight", experts, hidden)
        yield _f32(f"{stem}.ffn_gate_inp.bias", experts)
        for name, rows, columns in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
            matrix = f"{stem}.ffn_{name}_exps"
            yield gguf_tensor(f"{matrix}.weight", (experts, rows, columns), "MXFP4", from_somewhere(mxfp4, matrix, MXFP4_BYTES))
            yield _f32(f"{matrix}.bias", experts, rows)
        for norm in ("attn_norm", "post_attention_norm"):
            yield gguf_tensor(f"{stem}.{norm}.weight", (hidden,), "F32", F32_ONES)
    yield from _end(config)


def _attention(stem: str, config: Mapping[str, Any]) -> Iterator[Tensor]:
    hidden, head = config["hidden_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    for name, rows, columns in (("q", q, hidden), ("k", kv, hidden), ("v", kv, hidden), ("output", hidden, q)):
        yield _plain(f"{stem}.attn_{name}.weight", rows, columns)


def _end(config: Mapping[str, Any]) -> Iterator[Tensor]:
    yield gguf_tensor("output_norm.weight", (config["hidden_size"],), "F32", F32_ONES)
    yield _plain("output.weight", config["vocab_size"], config["hidden_size"])


def _plain(name: str, *shape: int) -> Tensor:
    return gguf_matrix(name, shape, "BF16")


def _f32(name: str, *shape: int) -> Tensor:
    return gguf_tensor(name, shape, "F32", from_somewhere(normal_f32, name, 4))


@cache
def normal_f32() -> bytes:
    return (np.random.default_rng(2).standard_normal(POOL_BYTES // 4, np.float32) * np.float32(DEVIATION)).tobytes()


@cache
def mxfp4() -> bytes:
    """Blocks of an exponent and 32 numbers of 4 bits, of deviation 0.02."""
    blocks = np.random.default_rng(3).integers(0, 256, (POOL_BYTES // MXFP4_BYTES, MXFP4_BYTES), np.uint8)
    blocks[:, 0] = SCALE
    return blocks.tobytes()


def gguf_of(given: Mapping[str, str]) -> GgufModel:
    """By the keys of this file's command. UserError for a format that is not written."""
    name, layers = given.get("model", "llama8b"), int(given["layers"]) if "layers" in given else None
    for key in ("format", "head"):
        if given.get(key, "BF16") not in GGUF_FILLS:
            raise UserError(f"{key}={given[key]}: choose from {', '.join(GGUF_FILLS)}")
    if name.startswith("gpt-oss"):
        return gpt_oss_gguf(gpt_oss_config({key: value for key, value in given.items() if key in KEYS}))
    config = config_of(name, layers)
    if "num_local_experts" in config:
        return mixtral_gguf(config)
    stored = given.get("format", "BF16")
    return dense_gguf(config, stored, given.get("head", stored))


def main() -> None:
    try:
        given = given_of(sys.argv[1:], ("out", "format", "head", *KEYS))
        if "out" not in given:
            raise UserError("out: missing; name a new file, out=FILE")
        gguf_of(given).write(Path(given["out"]))
    except UserError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()

"""Checkpoints of gpt-oss with random weights, written as they are published: routed experts in MXFP4, all else in BF16.

    python bench/gpt_oss_synth.py out=DIR [model=gpt-oss-120b] [layers=N] [hidden=N] [experts=N] [vocab=N]

20 layers of the 120b have 34 GB of experts. Every weight has a standard deviation of about 0.02, but for the embedding's of 1: what layers
add would be alike for all tokens, and so would be their experts. Every tensor is cut from the pools at a place of its own, so that each
layer routes otherwise. The disk sets the speed; memory: three pools of 32 MB.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import yaml

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.coded_synth import ONES, POOL_BYTES, SHARD_BYTES, Tensor, bits, from_somewhere, normal_bf16, same, tensor, write_shard  # noqa: E402
from bench.keys import given_of  # noqa: E402

GROUP = 32
SCALE = 120
"""2 ** -7: numbers of 4 bits have a mean square of 8.6."""
KEYS = ("model", "layers", "hidden", "experts", "vocab")


def gpt_oss_config(given: Mapping[str, str]) -> dict[str, Any]:
    """config.json of a published gpt-oss, with the sizes that ``given`` changes. A ``hidden`` is the width of experts, too."""
    text = (ROOT / "conf" / "model" / f"{given.get('model', 'gpt-oss-120b')}.yaml").read_text(encoding="utf-8")
    config: dict[str, Any] = yaml.safe_load(text)["config"]
    names = {"layers": ("num_hidden_layers",), "hidden": ("hidden_size", "intermediate_size"), "experts": ("num_local_experts",)}
    for key, changed in (names | {"vocab": ("vocab_size",)}).items():
        config |= dict.fromkeys(changed, int(given[key])) if key in given else {}
    kinds = ("sliding_attention", "full_attention")
    kinds_of = [kinds[layer % 2] for layer in range(config["num_hidden_layers"])]
    ends = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0}
    return {"architectures": ["GptOssForCausalLM"], "dtype": "bfloat16", **config, **ends, "layer_types": kinds_of}


def gpt_oss_tensors(config: Mapping[str, Any]) -> Iterator[Tensor]:
    """Of the checkpoint, in the model's order."""
    hidden, ffn, vocab, experts = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size", "num_local_experts"))
    heads, kv, dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]

    def plain(name: str, *shape: int, ones: bool = False) -> Tensor:
        return tensor(name, shape, "BF16", ONES if ones else from_somewhere(normal_bf16, name))

    yield tensor("model.embed_tokens.weight", (vocab, hidden), "BF16", wide_bf16)
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}"
        for name, rows, columns in (
            ("q", heads * dim, hidden),
            ("k", kv * dim, hidden),
            ("v", kv * dim, hidden),
            ("o", hidden, heads * dim),
        ):
            yield plain(f"{stem}.self_attn.{name}_proj.weight", rows, columns)
            yield plain(f"{stem}.self_attn.{name}_proj.bias", rows)
        yield plain(f"{stem}.self_attn.sinks", heads)
        yield plain(f"{stem}.mlp.router.weight", experts, hidden)
        yield plain(f"{stem}.mlp.router.bias", experts)
        for name, rows, columns in (("gate_up_proj", 2 * ffn, hidden), ("down_proj", hidden, ffn)):
            matrix = f"{stem}.mlp.experts.{name}"
            yield tensor(f"{matrix}_blocks", (experts, rows, columns // GROUP, GROUP // 2), "U8", from_somewhere(bits, matrix))
            yield tensor(f"{matrix}_scales", (experts, rows, columns // GROUP), "U8", same(struct.pack("B", SCALE)))
            yield plain(f"{matrix}_bias", experts, rows)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield plain(f"{stem}.{norm}.weight", hidden, ones=True)
    yield plain("model.norm.weight", hidden, ones=True)
    yield plain("lm_head.weight", vocab, hidden)


@cache
def wide_bf16() -> bytes:
    """Of deviation 1."""
    numbers = np.random.default_rng(1).standard_normal(POOL_BYTES // 2, np.float32)
    return (numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def write_gpt_oss(config: Mapping[str, Any], out: Path) -> None:
    """The checkpoint ``out``, a new directory."""
    out.mkdir(parents=True)
    shards: list[list[Tensor]] = [[]]
    for one in gpt_oss_tensors(config):
        if sum(t.nbytes for t in shards[-1]) > SHARD_BYTES:
            shards.append([])
        shards[-1].append(one)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as threads:
        list(threads.map(write_shard, [out / name for name in names], shards))
    index = {one.name: name for name, shard in zip(names, shards, strict=True) for one in shard}
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (out / "config.json").write_text(json.dumps(dict(config), indent=1))


def main() -> None:
    given = given_of(sys.argv[1:], ("out", *KEYS))
    if "out" not in given:
        raise SystemExit("out=: name a new directory")
    write_gpt_oss(gpt_oss_config(given), Path(given["out"]))


if __name__ == "__main__":
    main()

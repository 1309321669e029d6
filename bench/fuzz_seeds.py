"""What a fuzz begins with: sound files of every kind, of tiny models, made without a checkpoint."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.planner.common.measures import ALIGN
from penstock.planner.contract.checkpoint.checkpoint_files import PACK_FORMAT
from penstock.planner.contract.experts.routing import Phase
from penstock.planner.contract.experts.routing_files import routing_line
from penstock.planner.contract.plan.planfile import write_plan
from penstock.plans import solve

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
_MOE = {"model.layers": 2, "model.hidden": 64, "model.heads": 2, "model.kv_heads": 1, "model.head_dim": 32, "model.vocab": 256}
_DENSE = ("model=demo", "model.layers=3", "workload.prompt_tokens=64", "workload.new_tokens=8")
OVERRIDES = (
    ("hardware=rtx5080", *_DENSE),
    ("hardware=cpu", *_DENSE, "hardware.dram_bytes=1GB", "force.cap_layers=2"),
    ("hardware=t4", "model=mixtral8x7b", "model.layers=2", "workload=batch", "moe.policy=lru", "hardware.dram_bytes=20GB"),
    ("hardware=cpu", *_DENSE, "workload.objective=throughput", "workload.batch=0", "workload.kv_spill=true", "hardware.ssd.write_gbps=1.5"),
    ("hardware=h100", *_DENSE, "hardware.ssd.read=[[1048576,4,2.0],[4194304,4,3.0]]", "calibration=off", "workload.kept_tokens=256"),
    ("hardware=rtx5080", *_DENSE, "workload=serve", "workload.clients=4", "speculate=auto"),
    ("hardware=h100x4", *_DENSE, "ranks=2"),
    ("hardware=rtx5080", *_DENSE, "speculate=self", "force.speculate_tokens=3"),
)
"""Command lines of `planner solve`, each on its own."""


def shapes() -> dict[str, tuple[int, ...]]:
    """Parameters of ``CONFIG``'s model."""
    attn = {"q_proj": (16, 16), "k_proj": (8, 16), "v_proj": (8, 16), "o_proj": (16, 16)}
    ffn = {"gate_proj": (32, 16), "up_proj": (32, 16), "down_proj": (16, 32)}
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (64, 16), "lm_head.weight": (64, 16), "model.norm.weight": (16,)}
    for i in range(2):
        found |= {f"model.layers.{i}.self_attn.{name}.weight": shape for name, shape in attn.items()}
        found |= {f"model.layers.{i}.mlp.{name}.weight": shape for name, shape in ffn.items()}
        found |= {f"model.layers.{i}.{name}.weight": (16,) for name in ("input_layernorm", "post_attention_layernorm")}
    return found


def header() -> dict[str, Any]:
    """Of a safetensors file that holds ``shapes``."""
    made: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes().items():
        nbytes = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        made[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    return made


def packed_header(text: bytes, nbytes: int) -> bytes:
    """A safetensors file of ``nbytes`` bytes of zeros behind the header ``text``."""
    return struct.pack("<Q", len(text)) + text + bytes(nbytes)


def manifest() -> dict[str, Any]:
    """Of a packed store, without its checksum. Its weights are ``WEIGHTS_BYTES`` long."""
    tensors = {name: {"dtype": "BF16", "shape": value["shape"], "nbytes": value["data_offsets"][1] - value["data_offsets"][0]}
               for name, value in header().items() if name != "__metadata__"}  # fmt: skip
    sections = []
    for number, name in enumerate(("attn.0", "ffn.0", "attn.1", "ffn.1", "model.norm.weight")):
        parameters = [["a.weight", "BF16", [16, 16], 0, 512], ["b.weight", "BF16", [8, 16], 512, 256]]
        place = {"offset": ALIGN * (number + 1), "nbytes": ALIGN}
        sections.append({"name": name, **place, "xxh3_128": "0" * 32, "parameters": parameters})
    identity = "12345678-1234-5678-1234-567812345678"
    body = {"penstock_pack": PACK_FORMAT, "uuid": identity, "digest": "0" * 32, "weights": "weights.bin", "units": sections[:4]}
    return body | {"others": sections[4:], "tensors": tensors}


WEIGHTS_BYTES = 6 * ALIGN


def trace() -> bytes:
    """Routings of a small model, one line a token."""
    lines = [
        routing_line(i // 8, Phase.decode, i % 8, [[i % 4, (i + 1) % 4]] * 2, [[0.5, 0.25]] * 2, [[0.1, 0.2, 0.3, 0.4]]) for i in range(16)
    ]
    return "\n".join(lines).encode() + b"\n"


def layer_trace() -> bytes:
    """The same form of other people: one line a token and layer."""
    rows = [{"problem_id": 0, "token_idx": i // 2, "layer": i % 2, "experts": [i % 4, (i + 2) % 4]} for i in range(16)]
    return "\n".join(json.dumps(row) for row in rows).encode() + b"\n"


def plans(work: Path) -> list[bytes]:
    """Of a machine without a GPU, of one with, of a model with experts; that serves, of two ranks, of a model that drafts."""
    asked = (
        {"model": "demo", "hardware": "cpu", "model.layers": 3},
        {"model": "demo", "hardware": "rtx5080", "model.layers": 3, "vram": "1GiB"},
        {"model": "mixtral8x7b", "hardware": "t4", **_MOE, "model.expert_ffn": 64, "dram": "2GB"},
        {"model": "demo", "hardware": "rtx5080", "model.layers": 3, "workload": "serve", "workload.clients": 4, "speculate": "auto"},
        {"model": "demo", "hardware": "h100x4", "model.layers": 3, "ranks": 2},
        {"model": "demo", "hardware": "rtx5080", "model.layers": 3, "speculate": "self"},
    )
    made = []
    for one in asked:
        plan = solve(**{"workload.prompt_tokens": 32, "workload.new_tokens": 6, "calibration": "off", **one})  # type: ignore[arg-type]
        write_plan(plan, work / "seed.yaml")
        made.append((work / "seed.yaml").read_bytes())
    return made

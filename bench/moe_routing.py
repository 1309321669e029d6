"""Give a random MoE checkpoint a router whose choices have a stated skew, so that a cache of experts has something to find.

    python bench/moe_routing.py checkpoint=DIR share=0.6 slots=2 [seed=0]

Random weights route every token anew and evenly: no cache hits. Here a token's choice is a fixed function of the token: its embedding
carries a constant and a code of ``CODE`` numbers in its first channels, the blocks before the routers leave those channels alone, and the
routers look at nothing else. Each expert's score is a normal number from the code plus a bias by its rank, so strong that ``share`` of all
uses go to a layer's ``slots`` favourites. Which those are differs from layer to layer.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.keys import given_keys  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.planner.contract.checkpoint.checkpoint_files import read_checkpoint  # noqa: E402
from penstock.planner.contract.checkpoint.safetensors_header import TensorEntry  # noqa: E402
from penstock.runtime.store.parameters import DTYPES  # noqa: E402

CODE = 24
"""Channels of an embedding that say which token it is."""
SAMPLES = 20_000
"""Tokens by which the bias is found: 0.3 % of uses."""
BACK = ("self_attn.o_proj.weight", ".w2.weight", ".down_proj.weight")
"""Ends of the names of what is added to the residual stream."""
ROUTERS = ("block_sparse_moe.gate.weight", "mlp.gate.weight")


def favour(checkpoint: Path, share: float, slots: int, seed: int) -> float:
    """Rewrite ``checkpoint``'s embeddings and routers in place, and the first rows of what is added to the residual stream. The share that
    the drawn numbers gave."""
    found = read_checkpoint(checkpoint)
    experts = found.tensors[next(n for n in found.tensors if n.endswith(ROUTERS))].shape[0]
    top_k = int(found.config["num_experts_per_tok"])
    draw = np.random.default_rng(seed)
    strength = strength_for(share, slots, experts, top_k, draw)
    for name, entry in found.tensors.items():
        if name.endswith("embed_tokens.weight"):
            table = read(entry)
            table[:, 0] = 1.0
            table[:, 1 : 1 + CODE] = torch.from_numpy(draw.standard_normal((entry.shape[0], CODE))).to(table.dtype)
            write(entry, table)
        elif name.endswith(ROUTERS):
            router = torch.zeros(entry.shape, dtype=DTYPES[entry.dtype])
            router[:, 0] = torch.from_numpy(strength * draw.permutation(ranks(experts)))
            router[:, 1 : 1 + CODE] = torch.from_numpy(draw.standard_normal((experts, CODE)) / CODE**0.5)
            write(entry, router)
        elif name.endswith(BACK):
            rows = torch.zeros(1 + CODE, *entry.shape[1:], dtype=DTYPES[entry.dtype])
            write(entry, rows)
    os.sync()
    return share_of(strength, slots, experts, top_k, draw)


def ranks(experts: int) -> np.ndarray:
    """A bias for each expert, before its strength: even steps from 1 down to -1."""
    return np.linspace(1, -1, experts)


def strength_for(share: float, slots: int, experts: int, top_k: int, draw: np.random.Generator) -> float:
    """The bias's strength at which the ``slots`` favourites get ``share`` of all uses, by bisection."""
    low, high = 0.0, 20.0
    if not share_of(low, slots, experts, top_k, draw) <= share < 1:
        raise UserError(f"share={share}: {slots} of {experts} experts get {slots / experts:.2f} without a bias and less than 1 with it")
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if share_of(middle, slots, experts, top_k, draw) < share else (low, middle)
    return low


def share_of(strength: float, slots: int, experts: int, top_k: int, draw: np.random.Generator) -> float:
    """The favourites' share of ``SAMPLES`` tokens' uses."""
    scores = draw.standard_normal((SAMPLES, experts)) + strength * ranks(experts)
    return float((np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k] < slots).mean())


def read(entry: TensorEntry) -> torch.Tensor:
    with entry.file.open("rb") as file:
        file.seek(entry.offset)
        return torch.frombuffer(bytearray(file.read(entry.nbytes)), dtype=DTYPES[entry.dtype]).view(entry.shape)


def write(entry: TensorEntry, values: torch.Tensor) -> None:
    """The tensor's first rows."""
    with entry.file.open("r+b") as file:
        file.seek(entry.offset)
        file.write(values.contiguous().view(torch.uint8).numpy().tobytes())


def numbers(given: dict[str, str]) -> Iterator[float]:
    for key, usual in (("share", "0.6"), ("slots", "2"), ("seed", "0")):
        try:
            yield float(given.get(key, usual))
        except ValueError:
            raise UserError(f"{key}={given[key]}: must be a number") from None


def main() -> None:
    try:
        given = given_keys(sys.argv[1:], ("checkpoint", "share", "slots", "seed"), ())
        share, slots, seed = numbers(given)
        print(f"{favour(Path(given['checkpoint']), share, int(slots), int(seed)):.3f} of all uses go to {int(slots)} experts a layer")
    except UserError as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()

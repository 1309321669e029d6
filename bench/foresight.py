"""How often routers are right that are asked beforehand: of a checkpoint that fits in memory, by layers ahead and by rank.

    python bench/foresight.py checkpoint=DIR [prompt=TEXT] [new_tokens=200] [seed=0]

The model generates by sampling, then every router is applied to the hidden states that went into the MoE layers before its own. A line
for each distance has, for each of a token's top-k names, the share of visits that used it: those of 0.5 and more are what
`moe.policy=lookahead` fetches. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn
from transformers import AutoTokenizer
from transformers.utils import logging

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.keys import given_of  # noqa: E402
from penstock.planner.common.errors import UserError  # noqa: E402
from penstock.runtime.engine.validate import load_unstreamed  # noqa: E402
from penstock.runtime.experts.expert_modules import layers_with_experts  # noqa: E402

KEYS = ("checkpoint", "prompt", "new_tokens", "seed")
PROMPT = "Once upon a time there was a little dog who went to the park and found a ball."


def inputs_of(model: nn.Module, ids: torch.Tensor, new_tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of every MoE layer its router's weight, [experts, hidden], and the hidden states that it was given: [tokens, hidden]."""
    layers = model.model.layers
    blocks, seen = [layers[number].mlp for number, _ in layers_with_experts(layers)], {}
    hooks = [b.register_forward_pre_hook(lambda b, given: seen.update({b: given[0].flatten(0, -2)})) for b in blocks]
    with torch.no_grad():
        model(model.generate(ids, max_new_tokens=new_tokens, do_sample=True))
    for hook in hooks:
        hook.remove()
    return [(block.gate.weight.detach(), seen[block]) for block in blocks]


def right_shares(seen: list[tuple[torch.Tensor, torch.Tensor]], top_k: int) -> dict[int, list[float]]:
    """Layers ahead -> for each rank the share of visits that used the expert named, over all layers."""

    def names(layer: int, at: int) -> torch.Tensor:
        return (seen[at][1] @ seen[layer][0].T).topk(top_k).indices

    def right(layer: int, distance: int) -> torch.Tensor:
        return (names(layer, layer - distance)[:, :, None] == names(layer, layer)[:, None]).any(2).float().mean(0)

    layers = range(len(seen))
    return {d: torch.stack([right(layer, d) for layer in layers[d:]]).mean(0).tolist() for d in layers[1:]}


def main() -> None:
    try:
        given = given_of(sys.argv[1:], KEYS)
        if "checkpoint" not in given:
            raise UserError("checkpoint: none was named; give checkpoint=DIR, of a model with routed experts")
        checkpoint = Path(given["checkpoint"])
        if not (checkpoint / "config.json").exists():
            raise UserError(f"checkpoint={checkpoint}: has no config.json; name a downloaded model's directory")
        logging.disable_progress_bar()
        model = load_unstreamed(checkpoint, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        if not list(layers_with_experts(model.model.layers)):
            raise UserError(f"checkpoint={checkpoint}: has no routed experts; name a mixture of experts")
    except UserError as error:
        raise SystemExit(str(error)) from None
    torch.manual_seed(int(given.get("seed", "0")))
    ids = AutoTokenizer.from_pretrained(checkpoint)(given.get("prompt", PROMPT), return_tensors="pt").input_ids.to(model.device)
    found = right_shares(inputs_of(model, ids, int(given.get("new_tokens", "200"))), model.config.num_experts_per_tok)
    for distance, shares in found.items():
        print(f"{distance} ahead: " + ", ".join(f"{share:.1%}" for share in shares), flush=True)
    print(json.dumps(found, separators=(",", ":")))


if __name__ == "__main__":
    main()

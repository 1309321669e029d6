"""The gate of an MLP, silu(gate) * up, by a kernel of our own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation

from penstock.runtime.formats.kernels.on_card import layer_kernels
from penstock.runtime.model.fused.direct import product
from penstock.runtime.model.fused.known_code import computes_as

_MLP = """
def forward(self, x):
    down_proj = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return down_proj
"""


class FusedGates:
    """For MLPs whose code is Llama's and whose activation is SiLU."""

    def convert(self, model: PreTrainedModel) -> None:
        for module in model.modules():
            if computes_as(module, _MLP) and isinstance(module.act_fn, SiLUActivation | nn.SiLU):
                module.forward = partial(_gated, module)


def _gated(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    children, made = mlp._modules, None
    gate, up = product(children["gate_proj"], x), product(children["up_proj"], x)
    kernels = layer_kernels(x.device)
    if kernels is not None:
        made = kernels.gate(gate, up)
    return product(children["down_proj"], mlp.act_fn(gate) * up if made is None else made)

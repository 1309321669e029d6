"""Routed experts that `transformers` keeps outside its experts interface, or stores in another shape: made to look like the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.planner.contract.checkpoint.tally import TensorInfo
from penstock.runtime.store.tensor_parts import stored_transposed

ROUTED_INPUTS = "Llama4TextMoe"
"""Class of blocks that multiply what goes into an expert by its router's weight, and compute with all experts of a layer at once."""


def is_routed_by_inputs(block: nn.Module) -> bool:
    return type(block).__name__ == ROUTED_INPUTS


def name_experts(model: PreTrainedModel) -> None:
    """Say of Llama 4's experts what transformers' own interface would say of them."""
    for block in filter(is_routed_by_inputs, model.modules()):
        experts: Any = block.experts
        experts.config = model.config.get_text_config()
        experts.is_transposed, experts.has_gate, experts.has_bias = True, True, False
        experts._apply_gate = _Gate(experts.act_fn)


class _Gate:
    """gate and up, side by side -> their product."""

    def __init__(self, activation: nn.Module):
        self._activation = activation

    def __call__(self, both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return up * self._activation(gate)


def take_shape(model: PreTrainedModel, stored: Mapping[str, TensorInfo]) -> None:
    """Give experts that a checkpoint stores transposed the shape in which they are ``stored``: bytes move, and are never transposed."""
    for name in stored_transposed(model, stored):
        owner, _, leaf = name.rpartition(".")
        module: Any = model.get_submodule(owner)
        p = module.get_parameter(leaf)
        module.register_parameter(leaf, nn.Parameter(p.new_empty(p.shape[0], p.shape[2], p.shape[1]), requires_grad=False))
        module.is_transposed = module.was_transposed = True


def shape_as_made(model: PreTrainedModel) -> None:
    """The reverse of :func:`take_shape`, for a model that has all its weights. Takes a copy of the largest of them."""
    module: Any
    for module in model.modules():
        if getattr(module, "was_transposed", False):
            for name, p in list(module.named_parameters()):
                module.register_parameter(name, nn.Parameter(p.transpose(1, 2).contiguous(), requires_grad=False))
            module.is_transposed = module.was_transposed = False

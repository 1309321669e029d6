"""The routed experts of a `transformers` model: the one place that knows how its modules hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import cast

import torch
from torch import nn
from transformers import PreTrainedConfig

from penstock.planner.common.errors import UserError
from penstock.runtime.store.decoder import OwnLayers


class ExpertsModule(nn.Module):
    """What `transformers`' modules of routed experts have; none is made of this class."""

    num_experts: int
    is_transposed: bool
    has_gate: bool
    has_bias: bool
    act_fn: Callable[[torch.Tensor], torch.Tensor]
    _apply_gate: Callable[[torch.Tensor], torch.Tensor]
    config: PreTrainedConfig


def experts_module(layer: nn.Module) -> tuple[str, ExpertsModule] | None:
    """Name and module of the routed experts inside a decoder ``layer``, behind `transformers`' experts interface. That module computes by
    the function that its config names. None in a dense layer."""
    found = [(name, cast(ExpertsModule, module)) for name, module in layer.named_modules() if hasattr(module, "is_transposed")]
    return found[0] if found else None


def expert_parameters(module: ExpertsModule) -> Mapping[str, nn.Parameter]:
    """Parameters of an experts module, [experts, ...] each. UserError where it is made in another way."""
    parameters = dict(module.named_parameters())
    strange = [name for name, p in parameters.items() if "." in name or not p.dim() or p.shape[0] != module.num_experts]
    if strange or getattr(module, "has_post_expert_norm", False):
        what = f"parameter {strange[0]}" if strange else "a norm behind each expert"
        raise UserError(f"{type(module).__name__}: its {what} is not one part for each expert; models made so are not supported")
    return parameters


def layers_with_experts(layers: nn.ModuleList) -> Iterator[tuple[int, ExpertsModule]]:
    """(decoder layer, experts module) of every MoE layer; of sliced experts all layers of the whole model that have them."""
    if isinstance(layers, OwnLayers) and layers.sliced:
        yield from ((number, module) for number, (_, module) in layers.sliced.items())
        return
    for index, layer in enumerate(layers):
        found = experts_module(layer)
        if found is not None:
            yield index, found[1]

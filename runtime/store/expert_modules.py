"""The routed experts of a `transformers` model: the one place that knows how its modules hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn

from penstock.planner.common.errors import UserError


def experts_module(block: nn.Module) -> tuple[str, nn.Module] | None:
    """Name and module of a layer's routed experts inside ``block`` (an ``mlp``), behind `transformers`' experts interface. That module
    computes by the function that its config names. None in a dense layer."""
    found = [(name, module) for name, module in block.named_modules() if hasattr(module, "is_transposed")]
    return found[0] if found else None


def expert_parameters(module: nn.Module) -> Mapping[str, nn.Parameter]:
    """Parameters of an experts module, [experts, ...] each. UserError where it is made in another way."""
    parameters = dict(module.named_parameters())
    strange = [name for name, p in parameters.items() if "." in name or not p.dim() or p.shape[0] != module.num_experts]
    if strange or getattr(module, "has_post_expert_norm", False):
        what = f"parameter {strange[0]}" if strange else "a norm behind each expert"
        raise UserError(f"{type(module).__name__}: its {what} is not one part for each expert; models made so are not supported")
    return parameters


def layers_with_experts(layers: nn.ModuleList) -> Iterator[tuple[int, nn.Module]]:
    """(decoder layer, experts module) of every MoE layer."""
    for index, layer in enumerate(layers):
        found = experts_module(layer.mlp)
        if found is not None:
            yield index, found[1]

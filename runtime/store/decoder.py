"""The decoder inside a `transformers` model: its layers, and the module that a unit's weights belong to."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.placement import Unit

SUBMODULES: Mapping[str, str] = MappingProxyType({"attn": "self_attn", "ffn": "mlp", "expert": "mlp"})
"""Kind of unit -> the name of its module in a decoder layer."""


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The layers of ``model``'s decoder: the longest list of modules that all have ``self_attn`` and ``mlp``.

    A multimodal model's other towers, which may be longer, are left out: its ``get_decoder`` is asked. UserError where there is no list.
    """
    get = getattr(model, "get_decoder", None)
    root = get() if callable(get) else None
    lists = (module for module in (model if root is None else root).modules() if isinstance(module, nn.ModuleList) and len(module))
    found = [layers for layers in lists if all(hasattr(layer, name) for layer in layers for name in SUBMODULES.values())]
    if not found:
        raise UserError(
            f"{type(model).__name__}: no list of decoder layers with self_attn and mlp in it; "
            f"Penstock streams decoders such as Llama, Mistral, Qwen, Gemma and Mixtral"
        )
    return max(found, key=len)


def module_name(model: nn.Module, wanted: nn.Module) -> str:
    """Dotted name of ``wanted`` inside ``model``."""
    return next(name for name, module in model.named_modules() if module is wanted)


def submodule(layers: nn.ModuleList, unit: Unit) -> nn.Module:
    """The module of ``layers`` that ``unit`` feeds."""
    return getattr(layers[unit.layer], SUBMODULES[unit.kind])

"""The decoder inside a `transformers` model: its layers, and the modules that a unit's weights belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.tensor_names import block_of, one_block
from penstock.planner.contract.decided.placement import Unit


class ListedLayers(nn.ModuleList):
    """A slice is a list: models ask for one at each pass, and torch makes modules of it, which takes the host as long as a layer."""

    def __getitem__(self, at: Any) -> Any:
        return list(self._modules.values())[at] if isinstance(at, slice) else super().__getitem__(at)


class OwnLayers(ListedLayers):
    """Some layers of a list, numbered from 0; their names are their numbers in the whole list, by which a checkpoint knows them.

    ``sliced``: of the whole list's layers whose routed experts this rank has slices of, name and module of these, by the layer's number
    there. They are no children, since other ranks have most of those layers.
    """

    def __init__(self, layers: Mapping[int, nn.Module], sliced: Mapping[int, tuple[str, Any]] | None = None):
        super().__init__()
        for number, layer in layers.items():
            self.add_module(str(number), layer)
        self.sliced = sliced or {}

    def __getitem__(self, at: Any) -> Any:
        return list(self._modules.values())[at]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The layers of ``model``'s decoder: of the longest lists of modules that mix along tokens or have an FFN, the largest.

    A multimodal model's other towers, which may be longer, are left out: its ``get_decoder`` is asked. UserError where there is no list.
    """
    get = getattr(model, "get_decoder", None)
    root = get() if callable(get) else None
    found = (_lists(root) if root is not None else []) or _lists(model)
    if not found:
        raise UserError(
            f"{type(model).__name__}: no list of decoder layers in it, with self_attn, mlp and the like; "
            f"Penstock streams decoders such as Llama, Mistral, Qwen, Gemma and Mixtral"
        )
    return max(found, key=lambda layers: (len(layers), sum(p.numel() for p in layers.parameters())))


def _lists(root: nn.Module) -> list[nn.ModuleList]:
    lists = (module for module in root.modules() if isinstance(module, nn.ModuleList) and len(module))
    return [layers for layers in lists if all(any(True for _ in _blocks(layer)) for layer in layers)]


def module_name(model: nn.Module, wanted: nn.Module) -> str:
    """Dotted name of ``wanted`` inside ``model``."""
    return next(name for name, module in model.named_modules() if module is wanted)


def unit_modules(layers: nn.ModuleList, unit: Unit) -> dict[str, nn.Module]:
    """The children of ``unit``'s layer that it feeds, by name; none where its layer has no such unit."""
    layer = layers[unit.layer]
    blocks = dict(_blocks(layer))
    often = any(block == "attn" and isinstance(layer.get_submodule(name), nn.ModuleList) for name, block in blocks.items())
    if one_block(set(blocks.values()), often):
        blocks = dict.fromkeys(blocks, "ffn")
    kind = "attn" if unit.kind == "attn" else "ffn"
    return {name: layer.get_submodule(name) for name, block in blocks.items() if block == kind}


def _blocks(layer: nn.Module) -> Iterator[tuple[str, str]]:
    """Children of ``layer`` that hold weights, each with the block that it is of."""
    for name, child in layer.named_children():
        block = block_of(name)
        if block is not None and next(child.parameters(), None) is not None:
            yield name, block

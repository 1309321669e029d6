"""A PEFT LoRA adapter, merged into a model's weights as PEFT's ``merge_and_unload`` merges it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers.pytorch_utils import Conv1D

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.foreign_files import ADAPTER_WEIGHTS, adapter_digest
from penstock.planner.contract.checkpoint.safetensors_header import read_header
from penstock.planner.contract.checkpoint.tensor_names import classify
from penstock.runtime.store.adapter_config import AdapterConfig
from penstock.runtime.store.parameters import Slot, model_slots, tied_names

_PREFIX = "base_model.model."
_PRODUCTS = {"lora_A.weight": "lora_B.weight", "lora_embedding_A": "lora_embedding_B"}
"""Endings of an A -> those of its B."""


@dataclass(frozen=True)
class _Change:
    """Of one parameter: a product that is added, or what takes its place."""

    tensors: tuple[str, ...]
    """A and B, or the one that replaces the parameter."""
    factor: float = 1.0
    transposed: bool = False
    embedding: bool = False


@dataclass(frozen=True)
class Adapter:
    """Which parameters of a model an adapter changes, and how. Keeps names only; tensors are read one module at a time."""

    directory: Path
    config: AdapterConfig
    digest: str
    """xxh3_128 over its two files."""
    changes: Mapping[str, tuple[_Change, ...]]
    """By the parameter's full name; what takes its place comes before what is added."""

    @classmethod
    def open(cls, directory: Path, model: torch.nn.Module) -> Adapter:
        """Hold the adapter in ``directory`` against ``model``, which may be on the meta device. What is for the towers of a multimodal
        wrapper is left out, as they are. UserError names the first other tensor that has no place there."""
        digest, config = adapter_digest(directory), AdapterConfig.read(directory)
        shapes = {name: entry.shape for name, entry in read_header(directory / ADAPTER_WEIGHTS).items()}
        slots = {slot.full_name: slot for slot in model_slots(model).all if slot.part is None}
        tied = tied_names(model)
        tied_too = {*tied, *tied.values()}
        changes: dict[str, tuple[_Change, ...]] = {}
        for name in shapes:
            if name.endswith(tuple(_PRODUCTS.values())):
                continue
            parameter, change = _change(directory, name, shapes, model, config)
            if classify(parameter).kind == "ignored":
                continue
            if parameter not in slots or parameter in tied_too:
                why = (
                    "shared with another parameter" if parameter in tied_too else "no parameter of this model, or one of its routed experts"
                )
                raise UserError(
                    f"adapter={directory}: {name} changes {parameter}, which is {why}; merge it by PEFT, or use its own base model"
                )
            _check_shape(directory, name, change, shapes, slots[parameter])
            changes[parameter] = tuple(sorted((*changes.get(parameter, ()), change), key=lambda change: len(change.tensors)))
        if not changes:
            raise UserError(f"adapter={directory}: {ADAPTER_WEIGHTS} holds no LoRA tensors; save the adapter again")
        return cls(directory, config, digest, changes)

    def facts(self) -> dict[str, Any]:
        """What a packed store's manifest says of it."""
        return {"name": self.directory.resolve().name, "base": self.config.base, "xxh3_128": self.digest, "parameters": len(self.changes)}

    def merge(self, parameter: str, weight: torch.Tensor) -> None:
        """Change ``weight``, the whole parameter of this full name in its type, in place; nothing where the adapter has none.

        PEFT's arithmetic (tuners/lora/layer.py, ``get_delta_weight`` and ``merge``, with ``autocast_adapter_dtype``): A and B in float32,
        ``B @ A * factor`` is added in float32 and rounded once. An embedding's product is rounded before it is added. Takes 4 bytes an
        element beside the weight, since a product in parts may round otherwise.
        """
        for change in self.changes.get(parameter, ()):
            with safe_open(self.directory / ADAPTER_WEIGHTS, framework="pt") as file:
                tensors = [file.get_tensor(name).to(weight.device) for name in change.tensors]
            if len(tensors) == 1:
                weight.copy_(tensors[0])
                continue
            a, b = (tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor.clone() for tensor in tensors)
            product = (b @ a).mul_(change.factor)
            delta = product.T if change.transposed else product
            weight += delta.to(weight.dtype) if change.embedding else delta


def _change(
    directory: Path, name: str, shapes: Mapping[str, tuple[int, ...]], model: torch.nn.Module, config: AdapterConfig
) -> tuple[str, _Change]:
    """The parameter that the adapter's tensor ``name`` is for, and what is done with it."""
    place = name.removeprefix(_PREFIX)
    for ending, other in _PRODUCTS.items():
        if not place.endswith(f".{ending}"):
            continue
        module, second = place.removesuffix(f".{ending}"), name.removesuffix(ending) + other
        if second not in shapes or len(shapes[name]) != 2 or len(shapes[second]) != 2 or not shapes[name][0]:
            raise UserError(f"adapter={directory}: {name} has no {other} that it could be multiplied with; download the adapter again")
        embedding = ending.startswith("lora_embedding")
        transposed = embedding or isinstance(_module(model, module), Conv1D)
        return f"{module}.weight", _Change((name, second), config.factor(module, shapes[name][0]), transposed, embedding)
    if "lora_" in place:
        raise UserError(f"adapter={directory}: {name} is of a kind that is not merged here; merge it by PEFT's merge_and_unload")
    return place.replace(".base_layer.", "."), _Change((name,))


def _module(model: torch.nn.Module, name: str) -> torch.nn.Module | None:
    return dict(model.named_modules()).get(name)


def _check_shape(directory: Path, name: str, change: _Change, shapes: Mapping[str, tuple[int, ...]], slot: Slot) -> None:
    first, *rest = (shapes[tensor] for tensor in change.tensors)
    made = (rest[0][0], first[1]) if rest else first
    made = made[::-1] if change.transposed else made
    if made != slot.shape or (rest and rest[0][1] != first[0]):
        raise UserError(
            f"adapter={directory}: {name} makes {'x'.join(map(str, made))} of {slot.full_name}, which is {'x'.join(map(str, slot.shape))};"
            " it is another model's adapter: use its own base model"
        )

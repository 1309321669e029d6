"""Routers and norms that a GGUF file stores otherwise than the model computes: they lie and move as stored, and are changed when used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.planner.contract.checkpoint.tally import TensorInfo
from penstock.runtime.store.parameters import CAST, DTYPES
from penstock.runtime.store.tensor_parts import places_of

Change = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class RoutersAsStored:
    """Has routers beside routed experts keep the float type in which the checkpoint's ``tensors`` have them.

    A router is often all that such a layer's FFN holds beside experts, so it is a unit that moves. A call rounds its matrix, [experts,
    hidden], to the type that it had: the product is that of a router that was rounded when it was loaded.
    """

    tensors: Mapping[str, TensorInfo]

    def convert(self, model: PreTrainedModel) -> None:
        beside = {name.rpartition(".")[0] for name, module in model.named_modules() if hasattr(module, "is_transposed")}
        for name, module, dtype in _weights(model, self.tensors):
            computed = module.get_parameter("weight").dtype
            if dtype != computed and name.rpartition(".")[0] in beside:
                _changed_when_called(module, dtype, partial(_rounded, computed))


@dataclass(frozen=True)
class NormsAboveOne:
    """Has norms whose stored ``tensors`` are above their weights by one, as llama.cpp's Gemma has them, keep these.

    A call subtracts one in F32 and rounds: transformers does it when it reads such a file. Costs two small kernels a norm.
    """

    tensors: Mapping[str, TensorInfo]

    def convert(self, model: PreTrainedModel) -> None:
        for _, module, dtype in _weights(model, self.tensors):
            held = module.get_parameter("weight")
            if held.dim() == 1 and type(module).__name__.endswith("Norm"):
                _changed_when_called(module, dtype, partial(_less_one, held.dtype))


def _rounded(computed: torch.dtype, held: torch.Tensor) -> torch.Tensor:
    return held.to(computed)


def _less_one(computed: torch.dtype, held: torch.Tensor) -> torch.Tensor:
    return (held.float() - 1).to(computed)


def _weights(model: PreTrainedModel, tensors: Mapping[str, TensorInfo]) -> list[tuple[str, nn.Module, torch.dtype]]:
    """Modules with a plain ``weight``, by name, with the float type in which it is stored."""
    stored = {place.parameter: DTYPES.get(tensors[name].dtype) for name, place in places_of(model, tensors).items()}
    found = ((name, module, stored.get(f"{name}.weight")) for name, module in model.named_modules() if "weight" in module._parameters)
    return [(name, module, dtype) for name, module, dtype in found if dtype in CAST]


def _changed_when_called(module: nn.Module, dtype: torch.dtype, change: Change) -> None:
    """``module`` holds its weight in ``dtype``, and computes with what ``change`` makes of it."""
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        held = module._parameters["weight"]
        assert held is not None
        module._parameters["weight"] = change(held)  # type: ignore[assignment]
        try:
            return inner(*args, **kwargs)
        finally:
            module._parameters["weight"] = held

    module.forward = forward
    module.register_parameter("weight", nn.Parameter(module.get_parameter("weight").to(dtype), requires_grad=False))

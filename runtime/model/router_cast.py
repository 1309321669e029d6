"""Routers that a GGUF file stores wider than the model computes: they move as stored, and are rounded when they are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.planner.contract.checkpoint.tally import TensorInfo
from penstock.runtime.store.parameters import CAST, DTYPES
from penstock.runtime.store.tensor_parts import places_of


@dataclass(frozen=True)
class RoutersAsStored:
    """Has routers beside routed experts keep the float type in which the checkpoint's ``tensors`` have them.

    A router is often all that such a layer's FFN holds beside experts, so it is a unit that moves. A call rounds its matrix, [experts,
    hidden], to the type that it had: the product is that of a router that was rounded when it was loaded.
    """

    tensors: Mapping[str, TensorInfo]

    def convert(self, model: PreTrainedModel) -> None:
        beside = {f"{name.rpartition('.')[0]}." for name, module in model.named_modules() if hasattr(module, "is_transposed")}
        stored = {place.parameter: DTYPES.get(self.tensors[name].dtype) for name, place in places_of(model, self.tensors).items()}
        for name, module in model.named_modules():
            dtype = stored.get(f"{name}.weight")
            weight = module._parameters.get("weight")
            if weight is None or dtype not in CAST or dtype == weight.dtype or f"{name.rpartition('.')[0]}." not in beside:
                continue
            _round_when_called(module, weight.dtype)
            module.register_parameter("weight", nn.Parameter(weight.to(dtype), requires_grad=False))


def _round_when_called(module: nn.Module, dtype: torch.dtype) -> None:
    inner = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        held = module._parameters["weight"]
        assert held is not None
        module._parameters["weight"] = held.to(dtype)  # type: ignore[assignment]
        try:
            return inner(*args, **kwargs)
        finally:
            module._parameters["weight"] = held

    module.forward = forward  # type: ignore[method-assign]

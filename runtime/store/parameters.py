"""A model's parameters as the store sees them: those of each unit, and the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.experts.expert_modules import expert_parameters, experts_module

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F32": torch.float32,
        "F64": torch.float64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "U8": torch.uint8,
        "I8": torch.int8,
        "I16": torch.int16,
        "I32": torch.int32,
        "I64": torch.int64,
        "BOOL": torch.bool,
    }
)
"""safetensors' dtype names that a store can serve."""
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})

_SUBMODULES: Mapping[str, str] = MappingProxyType({"attn": "self_attn", "ffn": "mlp"})


@dataclass(frozen=True)
class Slot:
    """A place for a parameter in a module tree; ``shape`` and ``dtype`` are what must be put there."""

    full_name: str
    name: str
    """Relative to the unit's submodule, or the full name for others."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    part: int | None = None
    """Of a routed expert: which part of the parameter along its first dimension, ``shape`` being a part's. None: all of it. A parameter's
    last part comes last."""


@dataclass(frozen=True)
class ModelSlots:
    """Every parameter and persistent buffer of a model, tied ones once, under the name that comes first."""

    units: Mapping[Unit, tuple[Slot, ...]]
    """In forward order: attention, FFN and routed experts of layer 0, of layer 1, ..."""
    others: tuple[Slot, ...]

    @property
    def all(self) -> tuple[Slot, ...]:
        return tuple(slot for slots in self.units.values() for slot in slots) + self.others


def decoder_layers(model: torch.nn.Module) -> tuple[str, torch.nn.ModuleList]:
    """The name and the list of decoder layers: the longest ModuleList whose items all have ``self_attn`` and ``mlp``."""
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) and all(hasattr(m, "self_attn") and hasattr(m, "mlp") for m in module)
    ]
    if not found:
        raise UserError(
            f"{type(model).__name__}: no list of decoder layers with self_attn and mlp in it; "
            f"Penstock streams decoders such as Llama, Mistral, Qwen, Gemma and Mixtral"
        )
    return max(found, key=lambda item: len(item[1]))


def model_slots(model: torch.nn.Module) -> ModelSlots:
    """Divide ``model``'s state between units and others. Parameters of attention, FFN and each expert are units; buffers never are."""
    layers_name, layers = decoder_layers(model)
    units: dict[Unit, tuple[Slot, ...]] = {}
    taken: set[str] = set()
    for index in range(len(layers)):
        for kind, submodule in _SUBMODULES.items():
            prefix, module = f"{layers_name}.{index}.{submodule}.", getattr(layers[index], submodule)
            experts = _expert_slots(prefix, module) if kind == "ffn" else []
            routed = {slot.full_name for slots in experts for slot in slots}
            slots = (Slot(prefix + name, name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
            units[Unit(kind, index)] = tuple(slot for slot in slots if slot.full_name not in routed)
            units |= {Unit("expert", index, e): slots for e, slots in enumerate(experts)}
            taken |= {slot.full_name for slot in units[Unit(kind, index)]} | routed
    tied = tied_names(model)
    others = tuple(
        Slot(name, name, tuple(t.shape), t.dtype)
        for name, t in model.state_dict(keep_vars=True).items()
        if name not in taken and name not in tied
    )
    return ModelSlots(units, others)


def _expert_slots(prefix: str, block: torch.nn.Module) -> list[tuple[Slot, ...]]:
    """The slots of each routed expert of an ``mlp``; none in a dense layer."""
    found = experts_module(block)
    if found is None:
        return []
    prefix += f"{found[0]}."
    parameters = expert_parameters(found[1])
    return [
        tuple(Slot(prefix + name, name, tuple(p.shape[1:]), p.dtype, e) for name, p in parameters.items())
        for e in range(found[1].num_experts)
    ]


def tied_names(model: torch.nn.Module) -> Mapping[str, str]:
    """Names of ``model``'s state that stand for another's tensor -> that other's name. A checkpoint need not have them."""
    declared = getattr(model, "all_tied_weights_keys", None) or {}
    tied = {name: source for name, source in declared.items() if name != source}
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        source = first.setdefault(id(tensor), name)
        if source != name and name not in tied and source not in tied:
            tied[name] = source
    return tied

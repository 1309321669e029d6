"""A model's parameters as the store sees them: those of each unit, and the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.gguf.gguf_types import CODED
from penstock.runtime.formats.stored_parameters import StoredParameter, stored_parameters
from penstock.runtime.store.decoder import OwnLayers, decoder_layers, module_name, unit_modules
from penstock.runtime.store.expert_modules import ExpertsModule, expert_parameters, experts_module

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {
        "BF16": torch.bfloat16,
        "F16": torch.float16,
        "F32": torch.float32,
        "F64": torch.float64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "U8": torch.uint8,
        "I8": torch.int8,
        "I16": torch.int16,
        "I32": torch.int32,
        "I64": torch.int64,
        "BOOL": torch.bool,
        **{block.name: torch.uint8 for block in CODED.values()},
    }
)
"""Dtypes that a store can serve, by safetensors' names; blocks of GGUF files are bytes."""
CAST = (torch.bfloat16, torch.float16, torch.float32)
"""Of these, what never moves may be stored in one and computed with in another, as transformers casts what it loads."""
DTYPE_NAMES: Mapping[torch.dtype, str] = MappingProxyType({dtype: name for name, dtype in reversed(list(DTYPES.items()))})


@dataclass(frozen=True)
class Slot:
    """A place for a parameter in a module tree; ``shape`` and ``dtype`` are what must be put there."""

    full_name: str
    name: str
    """Relative to the unit's layer (a routed expert's: to its module), or the full name for others."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    part: int | None = None
    """Of a routed expert: which part of the parameter along its first dimension, ``shape`` being a part's. None: all of it. A parameter's
    last part comes last."""
    coded: StoredParameter | None = None
    """Of a leaf of a coded matrix: its format and what fills it."""


@dataclass(frozen=True)
class ModelSlots:
    """Every parameter and persistent buffer of a model, tied ones once, under the name that comes first."""

    units: Mapping[Unit, tuple[Slot, ...]]
    """In forward order: attention, FFN and routed experts of layer 0, of layer 1, ..."""
    others: tuple[Slot, ...]
    whole: Mapping[Unit, Unit]
    """Each of these as the whole model numbers it: a rank's layers are numbered from 0."""

    @property
    def all(self) -> tuple[Slot, ...]:
        return tuple(slot for slots in self.units.values() for slot in slots) + self.others


def model_slots(model: torch.nn.Module) -> ModelSlots:
    """Divide ``model``'s state between units and others. Parameters of attention, FFN and each expert are units; buffers
    never are, nor parameters that several modules share."""
    layers = decoder_layers(model)
    layers_name = module_name(model, layers)
    units: dict[Unit, tuple[Slot, ...]] = {}
    whole: dict[Unit, Unit] = {}
    sliced = layers.sliced if isinstance(layers, OwnLayers) else {}
    taken: set[str] = set()
    tied, of_text, coded = tied_names(model), _of_text(model), stored_parameters(model)
    shared = {*tied, *tied.values()}
    for index, (name, layer) in enumerate(layers.named_children()):
        prefix = f"{layers_name}.{name}."
        experts = _expert_slots(prefix, experts_module(layer), coded)
        routed = {slot.full_name for slots in experts for slot in slots}
        for unit in (Unit("attn", index), Unit("ffn", index)):
            names = ((f"{child}.{n}", p) for child, m in unit_modules(layers, unit).items() for n, p in m.named_parameters())
            slots = tuple(
                Slot(prefix + n, n, tuple(p.shape), p.dtype, coded=coded.get(prefix + n))
                for n, p in names
                if prefix + n not in routed | shared
            )
            units |= {unit: slots} if slots else {}
            taken |= {slot.full_name for slot in slots}
        units |= {} if sliced else {Unit("expert", index, e): slots for e, slots in enumerate(experts)}
        whole |= {unit: replace(unit, layer=int(name)) for unit in units if unit not in whole}
        taken |= routed
    for number, found in sliced.items():
        each = {Unit("expert", number, e): slots for e, slots in enumerate(_expert_slots(f"{layers_name}.{number}.", found, coded))}
        units, whole = units | each, whole | {unit: unit for unit in each}
    others = tuple(
        Slot(name, name, tuple(t.shape), t.dtype, coded=coded.get(name))
        for name, t in model.state_dict(keep_vars=True).items()
        if name not in taken and name not in tied and name.startswith(of_text)
    )
    return ModelSlots(units, others, whole)


def _of_text(model: torch.nn.Module) -> tuple[str, ...]:
    """How names begin of what a text needs: all of a text model; the decoder and the head of a wrapper, whose towers stay empty."""
    whole: Any = model
    config = getattr(model, "config", None)
    if config is None or config.get_text_config() is config:
        return ("",)
    return tuple(f"{module_name(model, module)}." for module in (whole.get_decoder(), whole.get_output_embeddings()))


def _expert_slots(prefix: str, found: tuple[str, ExpertsModule] | None, coded: Mapping[str, StoredParameter]) -> list[tuple[Slot, ...]]:
    """The slots of each routed expert of a layer, by :func:`experts_module`; none in a dense one."""
    if found is None:
        return []
    prefix += f"{found[0]}."
    parameters = expert_parameters(found[1])
    return [
        tuple(Slot(prefix + name, name, tuple(p.shape[1:]), p.dtype, e, coded.get(prefix + name)) for name, p in parameters.items())
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

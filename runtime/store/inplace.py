"""A Hugging Face safetensors checkpoint, read where it lies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import read_checkpoint
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.reading.layout import Parameter, Source, UnitLayout, lay_in_place
from penstock.runtime.store.parameters import DTYPES, Slot, model_slots, tied_names
from penstock.runtime.store.tensor_parts import part_of, pieces_of


@dataclass(frozen=True)
class Inventory:
    """A model's parameters, each with the checkpoint pieces that fill it, and where the checkpoint's tensors lie."""

    units: Mapping[Unit, tuple[Parameter, ...]]
    others: tuple[Parameter, ...]
    sources: Mapping[str, Source]
    digest: str

    @classmethod
    def of(cls, directory: Path, model: torch.nn.Module) -> Inventory:
        """Match the checkpoint in ``directory`` with ``model``. UserError names the first tensor that is missing or differs."""
        checkpoint = read_checkpoint(directory)
        slots = model_slots(model)
        shapes = {slot.full_name: slot.shape if slot.part is None else (slot.part + 1, *slot.shape) for slot in slots.all}
        tied = tied_names(model)
        shapes |= {name: shapes[source] for name, source in tied.items() if source in shapes}
        pieces = pieces_of(model, shapes, checkpoint.tensors)
        for name, source in tied.items():
            if source not in pieces and name in pieces:
                pieces[source] = pieces[name]

        def parameter(slot: Slot) -> Parameter:
            if slot.full_name not in pieces:
                raise UserError(
                    f"{directory}: no tensor for parameter {slot.full_name}; the checkpoint is incomplete or of another model: "
                    f"download it again"
                )
            for name in dict.fromkeys(piece.tensor for piece in pieces[slot.full_name]):
                stored = checkpoint.tensors[name].dtype
                if DTYPES.get(stored) != slot.dtype:
                    raise UserError(
                        f"{directory}: tensor {name} is {stored} and parameter {slot.full_name} {str(slot.dtype).removeprefix('torch.')}; "
                        f"weights are read as stored: set dtype in config.json to the tensors' own, or convert the checkpoint to one dtype"
                    )
            nbytes = math.prod(slot.shape) * slot.dtype.itemsize
            found = pieces[slot.full_name] if slot.part is None else part_of(pieces[slot.full_name], slot.part * nbytes, nbytes)
            return Parameter(slot.name, slot.shape, slot.dtype, nbytes, found)

        return cls(
            units={unit: tuple(parameter(slot) for slot in group) for unit, group in slots.units.items()},
            others=tuple(parameter(slot) for slot in slots.others),
            sources={name: Source(entry.file, entry.offset) for name, entry in checkpoint.tensors.items()},
            digest=checkpoint.digest,
        )


@dataclass(frozen=True)
class InPlaceStore:
    """Layouts over the checkpoint's own files. Keeps names and offsets only, about 1 kB a tensor."""

    directory: Path
    digest: str
    _units: Mapping[Unit, UnitLayout]
    _others: Mapping[str, UnitLayout]

    @classmethod
    def open(cls, directory: Path, model: torch.nn.Module) -> InPlaceStore:
        """Match ``directory`` with ``model`` and lay every unit out. UserError as ``Inventory.of``."""
        inventory = Inventory.of(directory, model)
        return cls(
            directory,
            inventory.digest,
            {unit: lay_in_place(group, inventory.sources) for unit, group in inventory.units.items()},
            {p.name: lay_in_place([p], inventory.sources) for p in inventory.others},
        )

    def unit(self, unit: Unit) -> UnitLayout:
        return self._units[unit]

    def others(self) -> Mapping[str, UnitLayout]:
        return self._others

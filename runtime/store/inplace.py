"""A Hugging Face safetensors checkpoint, read where it lies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import read_checkpoint
from penstock.planner.contract.checkpoint.quantised import quantisation_of
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.reading.layout import Parameter, Source, UnitLayout, lay_in_place
from penstock.runtime.store.parameters import CAST, DTYPES, Slot, model_slots, tied_names
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
        quantised = quantisation_of(checkpoint.config, str(directory))
        if quantised is not None:
            raise UserError(f"{directory}: stored in {quantised.format.name}, which is not run yet; use its BF16, F16 or F32 checkpoint")
        slots = model_slots(model)
        shapes = {slot.full_name: slot.shape if slot.part is None else (slot.part + 1, *slot.shape) for slot in slots.all}
        tied = tied_names(model)
        shapes |= {name: shapes[source] for name, source in tied.items() if source in shapes}
        pieces = pieces_of(model, shapes, checkpoint.tensors)
        for name, source in tied.items():
            if source not in pieces and name in pieces:
                pieces[source] = pieces[name]

        def stored(slot: Slot, cast: bool = False) -> torch.dtype:
            """The dtype of its tensors; with ``cast`` another float type than the slot's is allowed."""
            if slot.full_name not in pieces:
                raise UserError(
                    f"{directory}: no tensor for parameter {slot.full_name}; the checkpoint is incomplete or of another model: "
                    f"download it again"
                )
            names = list(dict.fromkeys(piece.tensor for piece in pieces[slot.full_name]))
            found = [DTYPES.get(checkpoint.tensors[name].dtype) for name in names]
            strange = next((n for n, dtype in zip(names, found, strict=True) if dtype != found[0] or not _serves(dtype, slot, cast)), None)
            if strange is not None:
                raise UserError(
                    f"{directory}: tensor {strange} is {checkpoint.tensors[strange].dtype} and parameter {slot.full_name} "
                    f"{str(slot.dtype).removeprefix('torch.')}; weights are read as stored: set dtype in config.json to the tensors' own, "
                    f"or convert the checkpoint to one dtype"
                )
            assert found[0] is not None  # one that is unknown serves no slot
            return found[0]

        def parameter(slot: Slot, loose: bool = False) -> Parameter:
            dtype = stored(slot, loose)
            nbytes = math.prod(slot.shape) * dtype.itemsize
            found = pieces[slot.full_name] if slot.part is None else part_of(pieces[slot.full_name], slot.part * nbytes, nbytes)
            return Parameter(slot.full_name if loose else slot.name, slot.shape, dtype, nbytes, found)

        loose = {slot.full_name for unit, group in slots.units.items() if unit.kind != "expert" for slot in _loose(group, stored)}
        units = {unit: [slot for slot in group if slot.full_name not in loose] for unit, group in slots.units.items()}
        others = [slot for group in slots.units.values() for slot in group if slot.full_name in loose] + [*slots.others]
        return cls(
            units={unit: tuple(parameter(slot) for slot in group) for unit, group in units.items()},
            others=tuple(parameter(slot, loose=True) for slot in others),
            sources={name: Source(entry.file, entry.offset) for name, entry in checkpoint.tensors.items()},
            digest=checkpoint.digest,
        )


def _serves(dtype: torch.dtype | None, slot: Slot, cast: bool) -> bool:
    return dtype == slot.dtype or (cast and dtype in CAST and slot.dtype in CAST)


def _loose(group: Sequence[Slot], stored: Callable[[Slot, bool], torch.dtype]) -> list[Slot]:
    """What of a unit is stored, or computed with, in another type than most of its bytes: that never moves."""
    if not group:
        return []
    usual = most_bytes((stored(slot, True), math.prod(slot.shape)) for slot in group)
    if usual != most_bytes((slot.dtype, math.prod(slot.shape)) for slot in group):
        return []
    return [slot for slot in group if (stored(slot, True), slot.dtype) != (usual, usual)]


def most_bytes(parts: Iterable[tuple[torch.dtype, int]]) -> torch.dtype:
    """The dtype with most bytes among (dtype, elements)."""
    total: Counter[torch.dtype] = Counter()
    for dtype, elements in parts:
        total[dtype] += elements * dtype.itemsize
    return total.most_common(1)[0][0]


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

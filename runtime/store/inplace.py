"""A Hugging Face safetensors checkpoint, read where it lies."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch

from penstock.planner.common.collector import uncollected
from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import TensorEntry, read_checkpoint
from penstock.planner.contract.checkpoint.gguf_checkpoint import files_beside
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.reading.layout import Parameter, Piece, Source, UnitLayout, lay_in_place
from penstock.runtime.store.parameters import CAST, DTYPES, Slot, model_slots, tied_names
from penstock.runtime.store.scales import Scale, scales_of
from penstock.runtime.store.tensor_parts import part_of, pieces_of


@dataclass(frozen=True)
class Inventory:
    """A model's parameters, each with the checkpoint pieces that fill it, and where the checkpoint's tensors lie."""

    units: Mapping[Unit, tuple[Parameter, ...]]
    others: tuple[Parameter, ...]
    sources: Mapping[str, Source]
    scales: tuple[Scale, ...]
    """Of coded matrices."""
    digest: str

    @classmethod
    @uncollected()
    def of(cls, directory: Path, model: torch.nn.Module) -> Inventory:
        """Match the checkpoint in ``directory`` with ``model``. UserError names the first tensor that is missing or differs."""
        checkpoint = read_checkpoint(directory)
        slots = model_slots(model)
        coded = {slot.full_name: slot.coded for slot in slots.all if slot.coded is not None}
        plain = [slot for slot in slots.all if slot.coded is None]
        shapes = {slot.full_name: slot.shape if slot.part is None else (slot.part + 1, *slot.shape) for slot in plain}
        tied = tied_names(model)
        shapes |= {name: shapes[source] for name, source in tied.items() if source in shapes}
        leaves = {tensor for stored in coded.values() for tensor in stored.tensors}
        pieces = pieces_of(model, shapes, {name: entry for name, entry in checkpoint.tensors.items() if name not in leaves})
        pieces |= {name: _one_by_one(stored.tensors, checkpoint.tensors) for name, stored in coded.items()}
        for name, source in tied.items():
            if source not in pieces and name in pieces:
                pieces[source] = pieces[name]

        known: dict[tuple[str, bool], torch.dtype] = {}

        def stored(slot: Slot, cast: bool = False) -> torch.dtype:
            """As ``looked_up``, once for all experts of a parameter."""
            if (slot.full_name, cast) not in known:
                known[slot.full_name, cast] = looked_up(slot, cast)
            return known[slot.full_name, cast]

        def looked_up(slot: Slot, cast: bool) -> torch.dtype:
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

        computed = getattr(model, "dtype", torch.float32)
        loose = {slot.full_name for unit, group in slots.units.items() if unit.kind != "expert" for slot in _loose(group, stored, computed)}
        units = {unit: [slot for slot in group if slot.full_name not in loose] for unit, group in slots.units.items()}
        others = [slot for group in slots.units.values() for slot in group if slot.full_name in loose] + [*slots.others]
        return cls(
            units={unit: tuple(parameter(slot) for slot in group) for unit, group in units.items()},
            others=tuple(parameter(slot, loose=True) for slot in others),
            sources={name: Source(entry.file, entry.offset) for name, entry in checkpoint.tensors.items()},
            scales=tuple(scales_of(slots.all, checkpoint.tensors)),
            digest=checkpoint.digest,
        )


def _serves(dtype: torch.dtype | None, slot: Slot, cast: bool) -> bool:
    return dtype == slot.dtype or (cast and dtype in CAST and slot.dtype in CAST)


def _one_by_one(names: Sequence[str], tensors: Mapping[str, TensorEntry]) -> tuple[Piece, ...]:
    """Whole tensors, one behind the other."""
    ends = accumulate((tensors[name].nbytes for name in names), initial=0)
    return tuple(Piece(name, 0, tensors[name].nbytes, dest) for name, dest in zip(names, ends, strict=False))


def _loose(group: Sequence[Slot], stored: Callable[[Slot, bool], torch.dtype], computed: torch.dtype) -> list[Slot]:
    """What of a unit is stored, or computed with, in another type than most of its bytes: that never moves. Beside coded matrices, what is
    cast or has another type than they are decoded to."""
    if not group:
        return []
    if any(slot.coded is not None for slot in group):
        return [slot for slot in group if slot.coded is None and (stored(slot, True), slot.dtype) != (computed, computed)]
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
    scales: tuple[Scale, ...]
    _units: Mapping[Unit, UnitLayout]
    _others: Mapping[str, UnitLayout]

    @classmethod
    def open(cls, directory: Path, model: torch.nn.Module) -> InPlaceStore:
        """Match ``directory`` with ``model`` and lay every unit out. UserError as ``Inventory.of``."""
        inventory = Inventory.of(directory, model)
        return cls(
            files_beside(directory),
            inventory.digest,
            inventory.scales,
            {unit: lay_in_place(group, inventory.sources) for unit, group in inventory.units.items()},
            {p.name: lay_in_place([p], inventory.sources) for p in inventory.others},
        )

    def unit(self, unit: Unit) -> UnitLayout:
        return self._units[unit]

    def others(self) -> Mapping[str, UnitLayout]:
        return self._others

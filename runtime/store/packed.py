"""A packed store: every unit one aligned, contiguous run of a file or of a block device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.reading.layout import UnitLayout
from penstock.runtime.store.escapes import check_escapes
from penstock.runtime.store.manifest import Manifest, read_manifest
from penstock.runtime.store.parameters import CAST, Slot, model_slots
from penstock.runtime.store.scales import Scale
from penstock.runtime.store.sections import Section


@dataclass(frozen=True)
class PackedStore:
    """Layouts over a packed weights file."""

    directory: Path
    manifest: Manifest
    _units: Mapping[Unit, UnitLayout]
    _others: Mapping[str, UnitLayout]

    @classmethod
    def open(cls, directory: Path, model: torch.nn.Module) -> PackedStore:
        """Check manifest, superblock and the places of escapes, and hold the sections against ``model``. UserError names the first that
        differs."""
        manifest = read_manifest(directory)
        sections = {s.name: s for s in (*manifest.units, *manifest.others)}
        slots = model_slots(model)
        others, found = list(slots.others), {unit: sections.get(str(slots.whole[unit])) for unit in slots.units}
        for unit, group in slots.units.items():
            loose = [slot for slot in group if slot.part is None and slot.full_name in sections]
            _match(directory, str(slots.whole[unit]), found[unit], [slot for slot in group if slot not in loose])
            others += [replace(slot, name=slot.full_name) for slot in loose]
        for slot in others:
            _match(directory, slot.name, sections.get(slot.name), (slot,), CAST)
        weights = manifest.weights_path(directory)
        check_escapes(weights, ((section, slots.units[unit]) for unit, section in found.items() if section))
        return cls(
            directory,
            manifest,
            {unit: section.layout(weights) for unit, section in found.items() if section},
            {slot.name: sections[slot.name].layout(weights) for slot in others},
        )

    @property
    def digest(self) -> str:
        return self.manifest.digest

    @property
    def scales(self) -> tuple[Scale, ...]:
        return ()

    def unit(self, unit: Unit) -> UnitLayout:
        return self._units[unit]

    def others(self) -> Mapping[str, UnitLayout]:
        return self._others


def _match(directory: Path, name: str, section: Section | None, slots: Sequence[Slot], cast: Sequence[torch.dtype] = ()) -> None:
    """``cast`` are dtypes that stand for one another."""
    stored = {t.name: (t.shape, t.dtype) for t in section.tensors} if section else {}
    for slot in slots:
        dtypes = cast if slot.dtype in cast else (slot.dtype,)
        if stored.get(slot.name) not in [(slot.shape, dtype) for dtype in dtypes]:
            found = f"has {stored[slot.name]}" if slot.name in stored else "lacks it"
            raise UserError(
                f"{directory}: parameter {slot.full_name} is {(slot.shape, slot.dtype)} in the model and section {name} of the "
                f"packed store {found}; pack this model's checkpoint again"
            )

"""The matrices of a checkpoint that another format can take: those of linear layers and of routed experts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import Checkpoint
from penstock.planner.contract.stored.scheme import Converted
from penstock.runtime.store.parameters import model_slots
from penstock.runtime.store.tensor_parts import places_of


@dataclass(frozen=True)
class Sources:
    """Reads a checkpoint's tensors one at a time, through the page cache."""

    checkpoint: Checkpoint
    units: Mapping[str, str]
    """Each matrix -> the unit that it belongs to: ``attn.3``, ``expert`` for all routed experts."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, model: PreTrainedModel, form: str) -> Sources:
        """Of ``checkpoint``, whose ``model`` has no weights. UserError unless its matrices are stored in BF16."""
        directory = checkpoint.directory
        if checkpoint.config.get("quantization_config"):
            raise UserError(f"format={form}: {directory} is quantised already; pack it as it is, without format=")
        slots = model_slots(model)
        unit_of = {
            slot.full_name: "expert" if unit.kind == "expert" else str(unit) for unit, group in slots.units.items() for slot in group
        }
        converted, found = Converted(), {}
        for name, place in places_of(model, checkpoint.tensors).items():
            owner = model.get_submodule(place.parameter.rpartition(".")[0])
            entry, fits = checkpoint.tensors[name], type(owner) is nn.Linear or hasattr(owner, "is_transposed")
            if place.parameter in unit_of and fits and converted.holds(name, entry.shape):
                found[name] = unit_of[place.parameter]
        strange = next((name for name in found if checkpoint.tensors[name].dtype != "BF16"), None)
        if strange is not None:
            raise UserError(
                f"format={form}: tensor {strange} is {checkpoint.tensors[strange].dtype}, allowed is BF16; pack {directory} as it is, "
                "or convert it to BF16"
            )
        if not found:
            raise UserError(f"format={form}: {directory} has no linear layers that could be stored so; pack it without format=")
        return cls(checkpoint, found)

    @cached_property
    def matrices(self) -> Mapping[str, tuple[int, ...]]:
        """Name -> (rows, columns), or (experts, rows, columns)."""
        return {name: self.checkpoint.tensors[name].shape for name in self.units}

    def read(self, name: str, expert: int | None = None) -> torch.Tensor:
        """A tensor, contiguous; of (experts, ...) one expert's. Takes its bytes."""
        with safe_open(self.checkpoint.tensors[name].file, framework="pt") as file:
            return (file.get_tensor(name) if expert is None else file.get_slice(name)[expert]).contiguous()

    def each(self, name: str) -> Iterator[torch.Tensor]:
        """The matrices of one tensor [rows, columns], one after the other."""
        shape = self.checkpoint.tensors[name].shape
        experts: list[int | None] = [None] if len(shape) == 2 else list(range(shape[0]))
        return (self.read(name, expert) for expert in experts)

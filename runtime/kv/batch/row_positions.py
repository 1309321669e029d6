"""Rotary frequencies of a packed input: those of each row alone, where they depend on its length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from penstock.runtime.kv.batch.row_parts import cut, joined, own_forward
from penstock.runtime.model.rows import Step

_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose frequencies depend on the sequence's length."""


class PositionsByRow:
    """Stands in for the forward of a rotary ``module`` whose frequencies depend on the length: one call a row, with its own."""

    def __init__(self, module: nn.Module, step: Callable[[], Step]):
        self._module, self.inner, self._step = module, own_forward(module), step
        module.forward = self

    def __call__(self, x: torch.Tensor, position_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        step, first, parts = self._step(), 0, []
        for row in step.rows:
            own = first, first + len(row.tokens), step.tokens
            self._forget_lengths()
            parts.append(self.inner(cut(x, *own), cut(position_ids, *own), *args, **kwargs))
            first = own[1]
        return joined(parts)

    def _forget_lengths(self) -> None:
        """What an earlier row's length made of the frequencies is undone."""
        if getattr(self._module, "rope_type", None) == "dynamic":
            self._module.max_seq_len_cached = self._module.original_max_seq_len
            now, original = (self._module.get_buffer(name) for name in ("inv_freq", "original_inv_freq"))
            self._module.register_buffer("inv_freq", original.to(now.device), persistent=False)


def positions_by_row(model: nn.Module, step: Callable[[], Step]) -> None:
    """Where it makes a difference, have the rotary modules of ``model`` called row by row."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if kind in _BY_LENGTH and hasattr(module, "inv_freq"):
            PositionsByRow(module, step)

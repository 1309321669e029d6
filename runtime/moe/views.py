"""Tensors over slots: what lies there as the model computes with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from runtime.model import views
from runtime.moe.dram import Key
from runtime.store.base import TensorLayout


class SlotViews:
    """Of each slot the tensors of the expert that lay there last: to make them anew for every use costs 10 µs a tensor."""

    def __init__(self, tensors: Mapping[Key, Sequence[TensorLayout]]):
        self._tensors = tensors
        self._known: dict[int, tuple[Key, Mapping[str, torch.Tensor]]] = {}

    def of(self, key: Key, slot: int, buffer: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The tensors of ``key``, which lies in ``slot``; ``buffer`` is that slot's."""
        known = self._known.get(slot)
        if known is None or known[0] != key:
            known = self._known[slot] = key, views(self._tensors[key], buffer)
        return known[1]

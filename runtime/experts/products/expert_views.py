"""Tensors over slots: what lies there as the model computes with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from penstock.runtime.model.binding import views
from penstock.runtime.store.base import TensorLayout


class PlacedTensors(dict[str, torch.Tensor]):
    """An expert's tensors as they are ``laid`` over a slot, beside what kernels and products made of where they lie. ``alike`` is the same
    of how they lie to each other, shared by all slots in which they do."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], laid: Sequence[TensorLayout], alike: dict[str, Any]):
        super().__init__(tensors)
        self.laid = laid
        self.known: dict[str, Any] = {}
        self.lies: Any = None
        """Where that is, as a table of experts has it; None until one has looked."""
        self.alike = alike


class SlotViews:
    """Of each slot the tensors as they lay there last: to make them anew for every use costs 10 µs a tensor. Experts with tensors at the
    same places share them."""

    def __init__(self, tensors: Mapping[tuple[int, int], Sequence[TensorLayout]]):
        """By layer and expert."""
        alike: dict[tuple[TensorLayout, ...], tuple[TensorLayout, ...]] = {}
        self._tensors = {key: alike.setdefault(tuple(laid), tuple(laid)) for key, laid in tensors.items()}
        self._known: dict[int, PlacedTensors] = {}
        self._alike: dict[int, dict[str, Any]] = {id(laid): {} for laid in alike.values()}
        self._all_alike = len(alike) == 1
        """Nearly always: to look up how an expert lies takes a host with cold caches 1 us."""

    def each(
        self, layer: int, experts: Sequence[int], slots: Sequence[int], buffers: Sequence[torch.Tensor]
    ) -> list[tuple[int, PlacedTensors]]:
        """``experts``, each with its tensors in its slot, one of ``buffers``."""
        known = self._known
        try:
            if self._all_alike:
                return [*zip(experts, map(known.__getitem__, slots), strict=True)]
        except KeyError:
            pass
        return [(expert, self.of((layer, expert), slot, buffers[slot])) for expert, slot in zip(experts, slots, strict=True)]

    def of(self, key: tuple[int, int], slot: int, buffer: torch.Tensor) -> PlacedTensors:
        """The tensors of ``key``, which lies in ``slot``; ``buffer`` is that slot's."""
        known, laid = self._known.get(slot), self._tensors[key]
        if known is None or known.laid is not laid:
            known = self._known[slot] = PlacedTensors(views(laid, buffer), laid, self._alike[id(laid)])
        return known

"""One token's experts of a layer as recorded kernels: where they lie is read from a table, so that each launch meets others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from penstock.runtime.experts.products.expert_products import Parameters
from penstock.runtime.experts.products.expert_views import PlacedTensors

APART = 256
"""Bytes of which the places of experts are multiples from each other."""
_LIES = "lies"
"""Under which an expert's tensors keep where they lie."""


class Lies(NamedTuple):
    """Where an expert's tensors lie: its lowest address, and each tensor from there on."""

    begin: int
    tensors: frozenset[tuple[str, int]]

    @classmethod
    def of(cls, expert: Parameters) -> Lies:
        """Kept beside tensors that stay where they are."""
        known = expert.known.get(_LIES) if isinstance(expert, PlacedTensors) else None
        if known is None:
            begin = min(tensor.data_ptr() for tensor in expert.values())
            known = cls(begin, frozenset((name, tensor.data_ptr() - begin) for name, tensor in expert.items()))
            if isinstance(expert, PlacedTensors):
                expert.known[_LIES] = known
        return known


class ExpertTable:
    """Places of ``count`` experts that recorded kernels read. ``first``: an expert from which the others' places are counted.

    ``alias`` gives page-locked bytes as a tensor that kernels read over the link: a copy into VRAM would queue behind those of experts.
    Takes 8 bytes an expert on both sides.
    """

    def __init__(self, count: int, first: Parameters, device: torch.device, alias: Callable[[torch.Tensor], torch.Tensor]):
        self.first, self._lies = first, Lies.of(first)
        host = torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._places = host.numpy()
        self._there = alias(host.view(torch.uint8)).view(torch.int64)
        self.numbers = torch.zeros(count, dtype=torch.int64, device=device)
        """As :meth:`penstock.runtime.experts.products.expert_products.Product.tabled` takes them."""

    def fetch(self) -> None:
        """What is recorded: kernels behind it find the places that the last :meth:`fill` before the launch gave."""
        torch.add(self._there, 0, out=self.numbers)

    def fill(self, experts: Sequence[Parameters]) -> bool:
        """The next launch computes with ``experts``. False where they are not as many, or lie otherwise."""
        if len(experts) != len(self._places):
            return False
        begin, tensors = self._lies
        lie = [Lies.of(expert) for expert in experts]
        if any(one.tensors != tensors or (one.begin - begin) % APART for one in lie):
            return False
        self._places[:] = [(one.begin - begin) // APART for one in lie]
        return True

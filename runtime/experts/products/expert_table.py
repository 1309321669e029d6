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
    """Places of ``count`` experts that recorded kernels read. ``first``: an expert from which the others' places are counted. Of an expert
    that is computed elsewhere it has the row of its result.

    ``alias`` gives page-locked bytes as a tensor that kernels read over the link: a copy into VRAM would queue behind those of experts.
    Takes 16 bytes an expert on both sides.
    """

    def __init__(self, count: int, first: Parameters, device: torch.device, alias: Callable[[torch.Tensor], torch.Tensor]):
        self.first, self._lies = first, Lies.of(first)
        host = torch.zeros(2 * count, dtype=torch.int64, pin_memory=device.type == "cuda")
        host[count:] = -1
        self._places, self._rows = host.numpy()[:count], host.numpy()[count:]
        self._there = alias(host.view(torch.uint8)).view(torch.int64)
        self._here = host.to(device, copy=True)
        self.numbers, self._elsewhere = self._here.split(count)
        """As :meth:`penstock.runtime.experts.products.expert_products.Product.tabled` takes them; rows of results, -1 for none."""

    def fetch(self) -> None:
        """What is recorded: kernels behind it find the places that the last :meth:`fill` before the launch gave."""
        torch.add(self._there, 0, out=self._here)

    def with_rows_of(self, results: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """What is recorded: ``rows`` [experts, width], those of experts that are computed elsewhere taken from ``results``."""
        at = self._elsewhere
        return torch.where((at >= 0)[:, None], results.index_select(0, at.clamp(min=0)).to(rows.dtype), rows)

    def fill(self, experts: Sequence[Parameters | int]) -> bool:
        """The next launch computes with ``experts``, or has the row of a result for one. False where they are not as many, lie otherwise,
        or all are computed elsewhere."""
        if len(experts) != len(self._places):
            return False
        begin, tensors = self._lies
        lie = [None if isinstance(expert, int) else Lies.of(expert) for expert in experts]
        here = [one for one in lie if one is not None]
        if not here or any(one.tensors != tensors or (one.begin - begin) % APART for one in here):
            return False
        # kernels compute with some expert in the place of one that is computed elsewhere
        self._places[:] = [((here[0] if one is None else one).begin - begin) // APART for one in lie]
        self._rows[:] = [expert if isinstance(expert, int) else -1 for expert in experts]
        return True

"""One token's experts of a layer as recorded kernels: where they lie is read from a table, so that each launch meets others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from struct import Struct
from typing import NamedTuple

import torch

from penstock.runtime.experts.products.beside_card import Made
from penstock.runtime.experts.products.expert_products import Parameters
from penstock.runtime.experts.products.expert_views import PlacedTensors

APART = 256
"""Bytes of which the places of experts are multiples from each other."""
_LIES = "lies"
"""Under which experts that lie alike keep how they do."""


class Lies(NamedTuple):
    """Where an expert's tensors lie: its lowest address, `APART` times ``place`` and ``odd`` bytes, and each tensor from there on."""

    place: int
    odd: int
    tensors: frozenset[tuple[str, int]]

    @property
    def begin(self) -> int:
        """The lowest address."""
        return self.place * APART + self.odd

    @classmethod
    def of(cls, expert: Parameters) -> Lies:
        """Kept beside tensors that stay where they are."""
        known: Lies | None = expert.lies if isinstance(expert, PlacedTensors) else None
        if known is None:
            begin = min(tensor.data_ptr() for tensor in expert.values())
            tensors = frozenset((name, tensor.data_ptr() - begin) for name, tensor in expert.items())
            if isinstance(expert, PlacedTensors):
                known = expert.lies = cls(*divmod(begin, APART), expert.alike.setdefault(_LIES, tensors))
            else:
                known = cls(*divmod(begin, APART), tensors)
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
        self._count, self._layout, self._words = count, Struct(f"={2 * count}q"), host.view(torch.uint8).numpy().data
        self._none = (-1,) * count
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

    def fill(self, experts: Sequence[Parameters | Made]) -> bool:
        """The next launch computes with ``experts``, or has the row of a result for one that is made elsewhere. False where they are not as
        many, lie otherwise, or all are computed elsewhere."""
        if len(experts) != self._count:
            return False
        first, odd, tensors = self._lies
        places: list[int] = []
        elsewhere: dict[int, int] = {}
        for expert in experts:
            if isinstance(expert, PlacedTensors):
                place, odd_one, lying = expert.lies or Lies.of(expert)
            elif isinstance(expert, Made):
                elsewhere[len(places)] = expert.at
                places.append(0)
                continue
            else:
                place, odd_one, lying = Lies.of(expert)
            if odd_one != odd or (lying is not tensors and lying != tensors):  # nearly always the same object
                return False
            places.append(place - first)
        rows: Sequence[int] = self._none
        if elsewhere:
            if len(elsewhere) == len(places):
                return False
            rows = [elsewhere.get(k, -1) for k in range(len(places))]
            some = next(place for k, place in enumerate(places) if k not in elsewhere)
            for k in elsewhere:  # kernels compute with some expert in the place of one that is computed elsewhere
                places[k] = some
        self._layout.pack_into(self._words, 0, *places, *rows)
        return True

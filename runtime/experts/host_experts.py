"""Experts for the CPU, which computes from their slots in DRAM."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from penstock.planner.contract.experts.expert_cache import Routing
from penstock.runtime.experts.expert_forward import Arrived, Fit, Group
from penstock.runtime.experts.products.expert_views import SlotViews
from penstock.runtime.experts.tiers.dram_experts import DramExperts
from penstock.runtime.experts.tiers.expert_fetch import Key
from penstock.runtime.memory.device import Event
from penstock.runtime.store.base import TensorLayout


class ComputeClock(Protocol):
    """Called when compute begins to wait for an expert, and when it goes on; either may come more than once."""

    def pause(self) -> None: ...

    def idle(self) -> None:
        """In place of ``pause`` where nothing is being computed: all that was issued is over."""

    def resume(self, arrival: Event | None = None) -> None: ...


class HostExperts:
    """Whatever the SSD has brought, at once, so that its slot is free for the next; what was there all along while it brings more, first
    what is not to stay. What came and is to stay frees a slot when the one that goes for it was used: that is next."""

    def __init__(self, dram: DramExperts, tensors: Mapping[Key, Sequence[TensorLayout]], clock: ComputeClock):
        self._dram, self._clock = dram, clock
        self._views = SlotViews(tensors)

    def route(self, index: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return index

    def visit(self, layer: int, routing: Routing, fit: Fit) -> Iterator[Sequence[Arrived]]:
        dram = self._dram
        here, coming = dram.visit(layer, routing, routing.experts)
        dram.judge(layer, routing)
        kept, waiting = deque(dram.leaving_first(layer, here) if coming else here), dict.fromkeys(coming)
        while kept or waiting:
            goes = kept and waiting and dram.held_up
            expert = dram.arrived(layer, waiting) if waiting and not goes else None
            if expert is None:
                expert = kept.popleft() if kept else self._awaited(layer, waiting)
            waiting.pop(expert, None)
            yield [(expert, self._use(layer, expert))]
            dram.release(layer, (expert,))

    def groups(self, layer: int, routing: Routing) -> Iterator[Group]:
        return map(Group, self.visit(layer, routing, len))

    def _awaited(self, layer: int, waiting: Collection[int]) -> int:
        self._clock.pause()
        while not (came := self._dram.next_parts(layer, waiting)).over:
            pass
        self._clock.resume()
        return came.expert

    def _use(self, layer: int, expert: int) -> Mapping[str, torch.Tensor]:
        return self._views.of((layer, expert), *self._dram.place(layer, expert))

"""Slots of experts in VRAM: who lies in which, what is copied into them, and what kernels find there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from penstock.planner.contract.experts.expert_cache import ExpertCache
from penstock.runtime.experts.products.expert_table import Lies
from penstock.runtime.experts.products.expert_views import SlotViews
from penstock.runtime.experts.tiers.carried_experts import CarriedExperts
from penstock.runtime.experts.tiers.dram_experts import DramExperts
from penstock.runtime.experts.tiers.expert_copies import ExpertCopies, Pieces
from penstock.runtime.experts.tiers.expert_fetch import Key
from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.moving.device_layout import DeviceLayout
from penstock.runtime.moving.ledger import Ledger


class CardSlots:
    """The slots of VRAM, ``buffers``, under ``cache``. What is copied into them lies in ``dram``, or comes through it from the SSD."""

    def __init__(
        self, layouts: Mapping[Key, DeviceLayout], buffers: Sequence[torch.Tensor], cache: ExpertCache, dram: DramExperts,
        device: CopyDevice, ledger: Ledger,
    ):  # fmt: skip
        calls = device.driver_calls()
        carrier = None if calls is None else dram.carrier(calls)
        self.copies = ExpertCopies(buffers, device, ledger, (dram.begins_at, dram.slot_bytes), dram.buffer, carrier)
        self.carried = CarriedExperts(layouts, self.copies, dram, carrier)
        self._layouts, self._cache, self._dram, self._device = layouts, cache, dram, device
        self._views = SlotViews({key: layout.tensors for key, layout in layouts.items()})

    def keep_first(self) -> dict[Key, torch.Tensor]:
        """The slots that layers keep, given to their first experts that DRAM does not keep: whoever calls this fills them before
        :meth:`start`."""
        places = {}
        for layer, expert in self._layouts:
            if self._dram.here(layer, expert):
                continue
            slot = self._cache.keep(layer, expert)
            if slot is not None:
                places[layer, expert] = self.copies.slots[slot]
        return places

    def start(self) -> None:
        """Fill from DRAM the slots that layers keep and that nobody filled, and wait for it. Meanwhile tensors are laid over all slots,
        some 60 us each: a step would wait for it."""
        held, over = {key: self._cache.slot(*key) for key in self._layouts}, None
        self.copies.lies_in(slot for slot in held.values() if slot is not None)
        for key in (key for key, slot in held.items() if slot is None and self._dram.here(*key)):
            slot = self._cache.keep(*key)
            if slot is not None:
                over = self.copy(key, slot, self._dram.place(*key)[0], self.carried.wholes[key])
        self.carried.prepare()
        self.copies.points.fill()
        for slot, buffer in enumerate(self.copies.slots):
            Lies.of(self._views.of(next(iter(self._layouts)), slot, buffer))
        if over is not None:
            self._device.host_waits(over)

    def take(self, layer: int, expert: int) -> int:
        """A slot for it, which there is."""
        slot = self._cache.take(layer, expert)
        if slot is None:
            raise RuntimeError(f"no slot for expert {layer}.{expert}")
        return slot

    def bring(self, layer: int, experts: Sequence[int]) -> None:
        """Give each of ``experts``, which lie in DRAM, a slot, and queue its copy. Until :meth:`CarriedExperts.settle` the visit itself
        keeps their slots there."""
        slots, dram_slots = self._cache.take_all(layer, experts), self._dram.slots(layer, experts)
        over = self.copies.copy(layer, experts, slots, dram_slots, self.carried.wholes_of(layer, experts))
        if not self._dram.still:
            self.carried.leaves(dram_slots, over)

    def copy(self, key: Key, slot: int, dram_slot: int, pieces: Pieces) -> Event:
        """Queue the copies of ``pieces`` of an expert. Returns the event behind them; until then nothing comes into ``dram_slot``."""
        layer, expert = key
        over = self.copies.copy(layer, (expert,), (slot,), (dram_slot,), (pieces,))
        if not self._dram.still:
            self._dram.read_until((dram_slot,), partial(self._device.host_waits, over))
        return over

    def placed(self, layer: int, experts: Sequence[int]) -> tuple[Sequence[int], Sequence[tuple[int, Mapping[str, torch.Tensor]]]]:
        """The slots of ``experts``, and they as kernels find them there."""
        slots = self._cache.slots(layer, experts)
        return slots, self._views.each(layer, experts, slots, self.copies.slots)

    def arrive(self, slots: Sequence[int], here: int, pause: Callable[[], None]) -> Event | None:
        """Kernels issued from now on find what lies in ``slots``, or is on its way there. Returns the last event that they wait for; before
        the first, ``pause`` is called. Only of the first ``here`` slots is it asked whether all has come: the answer takes the host longer
        than to have the card wait."""
        return self.await_all(self.copies.arrivals(slots, here), pause)

    def await_all(self, arrivals: Sequence[Event], pause: Callable[[], None]) -> Event | None:
        """Kernels issued from now on wait for ``arrivals``. Returns the last of them; before the first, ``pause`` is called."""
        late = None
        for arrival in arrivals:
            if late is None:
                pause()
            self._device.compute_waits(arrival)
            late = arrival
        return late

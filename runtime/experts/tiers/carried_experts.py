"""Parts of experts that come from the SSD, and their copies to VRAM by the threads that read them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from penstock.runtime.experts.tiers.dram_experts import DramExperts
from penstock.runtime.experts.tiers.expert_copies import ExpertCopies, Pieces
from penstock.runtime.experts.tiers.expert_fetch import Key
from penstock.runtime.memory.device import Event
from penstock.runtime.memory.pieces import Segment, within
from penstock.runtime.moving.device_layout import DeviceLayout
from penstock.runtime.reading.native.native_carrier import NativeCarrier
from penstock.runtime.reading.native.native_order import Order
from penstock.runtime.store.base import Extent

Carried = tuple[int, int, Order[Sequence[Extent]], Sequence[Event]]
"""The slot to which readers copy what the SSD brings, the slot of DRAM to which it does, the order by which, and an event behind each
part."""


class CarriedExperts:
    """Experts of ``layouts`` that come through ``dram``. Readers queue copies of their parts where they and the card's driver can:
    :attr:`possible`. Otherwise the consumer does, by :meth:`segments_of`."""

    def __init__(self, layouts: Mapping[Key, DeviceLayout], copies: ExpertCopies, dram: DramExperts, carrier: NativeCarrier | None):
        self._layouts, self._copies, self._dram, self._device = layouts, copies, dram, copies.device
        self._carrier = carrier
        self._segments: dict[tuple[Key, int], Sequence[Segment]] = {}
        alike: dict[tuple[Segment, ...], Pieces] = {}
        self.wholes = {key: alike.setdefault(tuple(x.segments), Pieces.of(x.segments)) for key, x in layouts.items()}
        """All of an expert; those that lie alike share it, so that caches have it."""
        (self._one, *others) = {id(whole): whole for whole in self.wholes.values()}.values()
        self._all_alike = not others
        self._orders: dict[Key, Order[Sequence[Extent]]] = {}
        self._begun: dict[int, Carried] = {}
        self._came: list[tuple[int, Mapping[int, Carried], Event]] = []
        self._left: list[tuple[Sequence[int], Event]] = []

    @property
    def possible(self) -> bool:
        return self._carrier is not None

    @property
    def awaited_unread(self) -> bool:
        """Whether :meth:`awaits` may have kernels wait for what has not been read."""
        return self._carrier is not None and self._carrier.has_word

    def awaits(self) -> bool:
        """Have kernels that are issued next wait for the copies of all that :meth:`carry` was asked for, and for all that was queued
        before: nobody sleeps for it. False, and nothing is known, where the last of it comes now, or came. :meth:`all_came` is still to
        be called."""
        return self._carrier is not None and self._carrier.awaits()

    def prepare(self) -> None:
        """Know all that may come, some 40 us and 2.3 kB an expert: a step would wait for it."""
        for key in self._layouts if not self._dram.still else ():
            if self._carrier is not None:
                self._order_of(key)
            else:
                for number in range(len(self._dram.parts(*key))):
                    self.segments_of(key, number)

    def wholes_of(self, layer: int, experts: Sequence[int]) -> list[Pieces]:
        """Of each of ``experts``. Nearly always all lie alike: to look one up takes a host with cold caches 1 us."""
        return [self._one] * len(experts) if self._all_alike else [self.wholes[layer, expert] for expert in experts]

    def segments_of(self, key: Key, number: int) -> Sequence[Segment]:
        """Of a part that the SSD brings."""
        found = self._segments.get((key, number))
        if found is None:
            segments, parts = self._layouts[key].segments, self._dram.parts(*key)
            pieces = [s for extent in parts[number] for s in within(segments, extent.dest, extent.nbytes)]
            found = self._segments[key, number] = segments if len(parts) == 1 else pieces
        return found

    def carry(self, take: Callable[[int, int], int | None], key: Key, dram_slot: int) -> Order[Sequence[Extent]] | None:
        """Have readers copy what they bring of ``key`` to ``dram_slot`` on to the slot that ``take`` gives it, when it comes by this order;
        None where they cannot. There is a slot."""
        carrier, copies = self._carrier, self._copies
        if carrier is None or not copies.reaches(dram_slot):
            return None
        slot, order = take(*key), self._orders.get(key)
        assert slot is not None, "there was room"
        if order is None:
            order = self._order_of(key)
        if copies.used:
            copies.make_way((slot,))
        events, handles = copies.points.take(len(order.parts))
        order.carry(carrier, copies.begins[slot], handles)
        self._begun[key[1]] = slot, dram_slot, order, events
        return order

    def begun(self) -> dict[int, Carried]:
        """Experts that :meth:`carry` was asked for since the last call."""
        begun, self._begun = self._begun, {}
        return begun

    def come(self, carried: Mapping[int, Carried]) -> Event | None:
        """Sleep until ``carried``, all that were asked for last, have come. Kernels that are issued next wait for the event that is
        returned, behind all copies that were queued until then; None where nothing is known. :meth:`all_came` is still to be called."""
        part = self._dram.come(self._copies.copied_s)
        if part is not None:
            for _, _, _, events in carried.values():
                if part < len(events):
                    return events[part]
                part -= len(events)
        return None

    def leaves(self, dram_slots: Sequence[int], over: Event) -> None:
        """Copies that read ``dram_slots`` are queued before ``over``: as what came, they are to be settled."""
        self._left.append((dram_slots, over))

    def all_came(self, layer: int, came: Mapping[int, Carried], awaited: bool = False) -> None:
        """Readers have queued all copies of experts that ``came``. Whoever waits for one of them waits for the last copy of all, unless
        they are ``awaited``. Call :meth:`settle` before their slots in DRAM are given back."""
        last, begun_ns, over = 0, 0, next(iter(came.values()))[3][0]
        slots: list[int] = []
        for slot, _, order, events in came.values():
            slots.append(slot)
            for at in range(0, len(order.told), 2):
                if order.told[at] > last:
                    last, begun_ns, over = order.told[at], order.told[at + 1], events[at >> 1]
        if not awaited:
            self._copies.carried(slots, over, begun_ns * 1e-9)
        self._came.append((layer, came, over))

    def settle(self) -> None:
        """Book what has come since the last call: nothing that is computed waits for it."""
        if self._left:
            left, self._left = self._left, []
            for dram_slots, over in left:
                self._dram.read_until(dram_slots, partial(self._device.host_waits, over))
        if self._came:
            all_came, self._came = self._came, []
            for layer, came, over in all_came:
                self._dram.read_until([dram_slot for _, dram_slot, *_ in came.values()], partial(self._device.host_waits, over))
                for expert, (_, _, order, events) in came.items():
                    self._copies.book(layer, expert, order, events)

    def close(self) -> None:
        """Nothing is queued any more by readers."""
        if self._carrier is not None:
            self._carrier.close()

    def _order_of(self, key: Key) -> Order[Sequence[Extent]]:
        found = self._orders.get(key)
        if found is None:
            words = [NativeCarrier.words(self.segments_of(key, number)) for number in range(len(self._dram.parts(*key)))]
            found = self._orders[key] = self._dram.order(key, words)
        return found

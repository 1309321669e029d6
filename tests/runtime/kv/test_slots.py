"""The slots of a tier, against a list that is searched from the front."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.runtime.kv.pages.page_slots import Slots, Taken

KEYS = st.sampled_from([bytes([i]) for i in range(6)])


def filled(slots: Slots, *keys: bytes) -> list[int]:
    """Take and publish each of ``keys``."""
    places = []
    for key in keys:
        places.append(slots.take(key).slot)
        slots.publish(key)
    return places


def test_the_page_used_longest_ago_makes_room() -> None:
    slots = Slots(3)
    first, second, third = filled(slots, b"a", b"b", b"c")
    assert len({first, second, third}) == 3
    assert slots.find(b"a") == first
    assert slots.take(b"d") == Taken(second, b"b")
    assert slots.find(b"b") is None and slots.find(b"d") is None, "a page is found once it is published"
    slots.publish(b"d")
    assert slots.find(b"d") == second


def test_a_held_page_stays() -> None:
    slots = Slots(2)
    first, second = filled(slots, b"a", b"b")
    assert slots.hold(b"a") == first == slots.hold(b"a")
    assert slots.take(b"c") == Taken(second, b"b")
    slots.release(first)
    assert slots.take(b"d") is None
    slots.release(first)
    assert slots.take(b"d") == Taken(first, b"a")


def test_a_page_is_taken_in_once() -> None:
    slots = Slots(2)
    slots.take(b"a")
    assert slots.take(b"a") is None and b"a" in slots
    slots.publish(b"a")
    assert slots.take(b"a") is None


def test_a_slot_whose_page_did_not_come_is_free() -> None:
    slots = Slots(1)
    slot = slots.take(b"a").slot
    assert slots.take(b"b") is None
    slots.abandon(b"a")
    assert b"a" not in slots and slots.take(b"b") == Taken(slot, None)


def test_a_page_dropped_while_it_is_held_gives_its_slot_back_when_it_is_released() -> None:
    slots = Slots(1)
    (slot,) = filled(slots, b"a")
    slots.hold(b"a")
    slots.drop(b"a")
    assert slots.find(b"a") is None and slots.take(b"b") is None
    slots.release(slot)
    assert slots.take(b"b") == Taken(slot, None)


def test_some_slots_are_left_to_others() -> None:
    slots = Slots(3)
    filled(slots, b"a")
    assert slots.take(b"b", leave=2) is not None
    assert slots.take(b"c", leave=2) is None
    assert slots.take(b"c", leave=1) is not None


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_slots_are_no_mistake(count: int) -> None:
    slots = Slots(count)
    assert [slots.take(bytes([i])) is not None for i in range(2)] == [i < count for i in range(2)]


@dataclass
class Page:
    key: bytes
    slot: int
    ready: bool = False
    held: int = 0


@dataclass
class Model:
    """Pages, the least recently used first, and slots that are held without a page."""

    pages: list[Page] = field(default_factory=list)
    orphans: list[Page] = field(default_factory=list)


class SlotsMachine(RuleBasedStateMachine):
    """Any order of calls: what is found, who makes room, and no slot is two pages'."""

    COUNT = 3

    def __init__(self) -> None:
        super().__init__()
        self.slots = Slots(self.COUNT)
        self.model = Model()

    def page(self, key: bytes, ready: bool = True) -> Page | None:
        return next((p for p in self.model.pages if p.key == key and p.ready == ready), None)

    @rule(key=KEYS, leave=st.integers(0, 2))
    def take(self, key: bytes, leave: int) -> None:
        pages, orphans = self.model.pages, self.model.orphans
        free = self.COUNT - len(pages) - len(orphans)
        evictable = [p for p in pages if p.ready and not p.held]
        got = self.slots.take(key, leave)
        if self.page(key) or self.page(key, ready=False) or free + len(evictable) <= leave:
            assert got is None
            return
        if not free:
            victim = evictable[0]
            assert got == Taken(victim.slot, victim.key)
            pages.remove(victim)
        assert got.slot in range(self.COUNT) and got.slot not in [p.slot for p in pages + orphans]
        pages.append(Page(key, got.slot))

    @rule(key=KEYS)
    def find(self, key: bytes) -> None:
        page = self.page(key)
        assert self.slots.find(key) == (page.slot if page else None)
        if page:
            self._use(page)

    @rule(key=KEYS)
    def hold(self, key: bytes) -> None:
        page = self.page(key)
        assert self.slots.hold(key) == (page.slot if page else None)
        if page:
            page.held += 1
            self._use(page)

    @precondition(lambda self: any(p.held for p in self.model.pages + self.model.orphans))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from([p for p in self.model.pages + self.model.orphans if p.held]))
        self.slots.release(page.slot)
        page.held -= 1
        self.model.orphans = [p for p in self.model.orphans if p.held]

    @precondition(lambda self: any(not p.ready for p in self.model.pages))
    @rule(data=st.data(), comes=st.booleans(), hold=st.booleans())
    def finish(self, data: st.DataObject, comes: bool, hold: bool) -> None:
        page = data.draw(st.sampled_from([p for p in self.model.pages if not p.ready]))
        if comes:
            self.slots.publish(page.key, hold)
            page.ready, page.held = True, int(hold)
            self._use(page)
        else:
            self.slots.abandon(page.key)
            self.model.pages.remove(page)

    @rule(key=KEYS)
    def drop(self, key: bytes) -> None:
        self.slots.drop(key)
        page = self.page(key)
        if page:
            self.model.pages.remove(page)
            if page.held:
                self.model.orphans.append(page)

    @invariant()
    def the_same_pages_are_there(self) -> None:
        assert len(self.slots) == sum(p.ready for p in self.model.pages)
        assert all((bytes([i]) in self.slots) == any(p.key == bytes([i]) for p in self.model.pages) for i in range(6))

    def _use(self, page: Page) -> None:
        self.model.pages.remove(page)
        self.model.pages.append(page)


TestAnyOrder = SlotsMachine.TestCase
TestAnyOrder.settings = settings(max_examples=80, deadline=None)

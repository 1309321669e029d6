"""What comes in parts by one call: each part is copied on as it comes, and somebody hears of all of them once."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.common.measures import ALIGN
from penstock.planner.contract.checkpoint.checkpoint_files import TensorEntry
from penstock.runtime.memory.bare_copies import DriverCalls
from penstock.runtime.memory.pieces import Segment
from penstock.runtime.moving.arriving_scales import ArrivingScales, UrgentSoundReads
from penstock.runtime.reading.landing import address_of
from penstock.runtime.reading.layout import Extent
from penstock.runtime.reading.native import readers_library
from penstock.runtime.reading.native.native_carrier import NativeCarrier
from penstock.runtime.reading.native.native_order import Come
from penstock.runtime.reading.reader import ReadPool
from penstock.runtime.reading.reads_inbox import Ticket
from penstock.runtime.store.scales import Scale
from tests.cli import HANGS_S
from tests.runtime.test_native_readers import SIZE, Held, buffer, content, handed_back, no_waiting
from tests.support import COPY, ENTER, RECORD, WAIT

__all__ = ["content", "no_waiting"]
pytestmark = pytest.mark.skipif(not readers_library.readers_file().exists(), reason="no compiler made the readers")
NBYTES = 96 * ALIGN
Heard = list[tuple[Any, BaseException | None]]


class PlayedCard:
    """Copies at once; ``refuses`` is what the copy of so many bytes returns."""

    def __init__(self) -> None:
        self.memory = buffer(NBYTES)
        self.events: list[int] = []
        self.refuses = -1
        self.waits: list[int] = []
        self._calls = ENTER(lambda context: 0), COPY(self._copied), RECORD(self._recorded), WAIT(self._waited)

    @property
    def calls(self) -> DriverCalls:
        enter, copy, record, wait = (ctypes.cast(call, ctypes.c_void_p).value or 0 for call in self._calls)
        return DriverCalls(enter, 0, copy, record, 0, wait, 77)

    def _copied(self, to: int, source: int, nbytes: int, stream: int) -> int:
        if nbytes == self.refuses:
            return 700
        ctypes.memmove(to, source, nbytes)
        return 0

    def _recorded(self, event: int, stream: int) -> int:
        self.events.append(event)
        return 0

    def _waited(self, stream: int, event: int, flags: int) -> int:
        assert (stream, flags) == (77, 0)
        self.waits.append(event)
        return 0


class Orders:
    """Parts of ``path`` that come into one buffer and from there to a card."""

    def __init__(self, reads: Any, card: PlayedCard, parts: list[tuple[Extent, ...]]):
        self.reads, self.card, self.parts, self.into = reads, card, parts, buffer(NBYTES)
        found = reads.carrier(card.calls)
        assert isinstance(found, NativeCarrier)
        self.carrier, self.inbox = found, reads.inbox()
        words = [NativeCarrier.words([Segment(e.dest, e.dest, e.nbytes) for e in part]) for part in parts]
        self.order = reads.order("order", parts, NBYTES, words)
        self.events: list[int] = []

    def bring(self) -> Come:
        first = 1 + len(self.events)
        events = [*range(first, first + len(self.parts))]
        self.events += events
        self.order.carry(self.carrier, address_of(self.card.memory), array("q", events))
        come: Come = self.reads.bring([(self.order, "all", self.into, address_of(self.into))], self.inbox)
        return come

    def heard(self) -> Heard:
        """All that is heard of one order, and whatever else comes."""
        came: Heard = []
        while not came:
            came = self.inbox.take(HANGS_S)
        return came + self.inbox.take(0.0)


@contextmanager
def orders(parts: list[tuple[Extent, ...]], threads: int = 2, scales: list[Scale] | None = None) -> Iterator[tuple[Orders, ReadPool]]:
    with ReadPool(threads, 2 * ALIGN) as pool:
        yield Orders(UrgentSoundReads(pool, ArrivingScales(scales or [])), PlayedCard(), parts), pool


def drawn(path: Path, draw: random.Random, most: int = 4) -> list[tuple[Extent, ...]]:
    """Up to ``most`` parts of up to three extents each, side by side in a buffer."""
    parts, dest = [], 0
    for _ in range(draw.randint(1, most)):
        part = []
        for _ in range(draw.randint(1, 3)):
            nbytes = draw.choice([1, draw.randint(1, 5 * ALIGN), 4 * ALIGN])
            offset = draw.randint(0, SIZE - nbytes)
            part.append(Extent(path, offset, nbytes, dest + offset % ALIGN))
            dest += 7 * ALIGN
        parts.append(tuple(part))
    return parts


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**6), threads=st.integers(1, 3), odd=st.booleans())
def test_each_part_is_copied_on_and_all_are_heard_of_once(content: tuple[Path, bytes], seed: int, threads: int, odd: bool) -> None:
    """Again and again; blocks that come back to Python as well."""
    path, data = content
    parts = drawn(path, random.Random(seed))
    with orders(parts, threads) as (asked, pool):
        for turn in range(3):
            if odd:
                handed_back(pool, path)
            asked.bring()
            assert asked.heard() == [("all", None)]
            for e in (e for part in parts for e in part):
                there = asked.card.memory[e.dest : e.dest + e.nbytes] == data[e.offset : e.offset + e.nbytes]
                assert there, e
                asked.card.memory[e.dest : e.dest + e.nbytes] = bytes(e.nbytes)
            assert sorted(asked.order.numbers) == [*range(turn * len(parts) + 1, (turn + 1) * len(parts) + 1)]
            assert asked.order.refusal() is None and min(asked.order.begun_ns) > 0
        assert sorted(asked.card.events) == asked.events


def test_a_part_is_copied_on_while_others_are_still_read(content: tuple[Path, bytes], tmp_path: Path) -> None:
    path, data = content
    late = tmp_path / "late"
    late.write_bytes(data)
    with orders([(Extent(path, 0, ALIGN, 0),), (Extent(late, 0, ALIGN, 5 * ALIGN),)]) as (asked, pool):
        held, given_ = Held(pool, late), threading.Event()
        asked.bring()
        assert held.begun.wait(HANGS_S)
        for _ in range(1000):
            if asked.card.events:
                break
            given_.wait(HANGS_S / 1000)
        assert asked.card.events == [1] and asked.inbox.take(0.0) == []
        held.go.set()
        assert asked.heard() == [("all", None)]
        assert asked.card.events == [1, 2]


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_error_of_one_part_is_heard_of_once_when_the_others_are_over(content: tuple[Path, bytes], tmp_path: Path, which: int) -> None:
    path, _ = content
    files = [tmp_path / "gone" if i == which else path for i in range(3)]
    with orders([(Extent(file, 0, 3 * ALIGN, 5 * i * ALIGN),) for i, file in enumerate(files)]) as (asked, _):
        asked.bring()
        ((key, error),) = asked.heard()
        assert key == "all" and "gone: cannot be opened" in str(error)
        assert which + 1 not in asked.card.events


def test_what_the_driver_refuses_is_heard_of_once(content: tuple[Path, bytes]) -> None:
    path, _ = content
    with orders([(Extent(path, 0, ALIGN, 0),), (Extent(path, 0, 77, 5 * ALIGN),)]) as (asked, _):
        asked.card.refuses = 77
        asked.bring()
        ((_, error),) = asked.heard()
        assert str(error) == "CUDA error: to queue a copy of what was read returned 700" and asked.card.events == [1]


@pytest.mark.parametrize("bad", [None, 0, 1])
def test_scales_are_looked_at_when_they_first_come(tmp_path: Path, bad: int | None) -> None:
    path, stored = tmp_path / "scales", bytearray(b"\x3c" * 2 * ALIGN)
    if bad is not None:
        stored[bad * ALIGN + 6 : bad * ALIGN + 8] = b"\xff\xff"
    path.write_bytes(stored)
    scale = Scale("scales", TensorEntry(path, 0, len(stored), "U8", (1, 1)), True, torch.float16, 0, (0,))
    with orders([(Extent(path, i * ALIGN, ALIGN, 5 * i * ALIGN),) for i in range(2)], scales=[scale]) as (asked, _):
        asked.bring()
        ((_, error),) = asked.heard()
        assert (error is None) == (bad is None)
        if bad is None:
            path.write_bytes(b"\xff" * len(stored))
            asked.bring()
            assert asked.heard() == [("all", None)], "is looked at once"
        else:
            assert "holds scales that are no numbers" in str(error) and asked.order.numbers[bad] == 0


@pytest.mark.parametrize("apart", [False, True])
def test_what_came_before_by_another_way_is_not_looked_at_again(tmp_path: Path, apart: bool) -> None:
    """All parts of an order, or one of them."""
    path = tmp_path / "scales"
    path.write_bytes(b"\x3c" * 2 * ALIGN)
    scale = Scale("scales", TensorEntry(path, 0, 2 * ALIGN, "U8", (1, 1)), True, torch.float16, 0, (0,))
    with orders([(Extent(path, i * ALIGN, ALIGN, 5 * i * ALIGN),) for i in range(2)], scales=[scale]) as (asked, _):
        parts = asked.parts[: 1 if apart else 2]
        asked.reads.read_each(parts, asked.into, [Ticket(asked.inbox, "part") for _ in parts])
        came: Heard = []
        while len(came) < len(parts):
            came += asked.inbox.take(HANGS_S)
        assert came == [("part", None)] * len(parts)
        path.write_bytes(b"\xff" * 2 * ALIGN)
        asked.bring()
        ((_, error),) = asked.heard()
        assert (error is not None) == apart and list(asked.order.looked) == [0, int(apart)]


def test_blocks_bear_their_orders_name_however_late_they_are_booked(content: tuple[Path, bytes]) -> None:
    path, _ = content
    booked = list[tuple[str, int, int]]()
    with ReadPool(2, ALIGN, on_block=lambda thread, name, number, begun, ended, nbytes: booked.append((name, number, nbytes))) as pool:
        asked = Orders(pool, PlayedCard(), [(Extent(path, 0, 2 * ALIGN, 0, True),), (Extent(path, 5 * ALIGN, ALIGN, 5 * ALIGN, True),)])
        for _ in range(2):
            asked.bring()
            asked.heard()
        assert pool.meter.bytes == 6 * ALIGN
        assert [(name, nbytes) for name, _, nbytes in booked] == [("order", ALIGN)] * 6
        assert len({number for _, number, _ in booked}) == 2, "one for all parts"
        assert not pool._readers._names, "they are forgotten"  # type: ignore[union-attr]


@pytest.mark.parametrize("delay", [0.0, 0.002])
def test_every_order_is_heard_of_once_whenever_the_pool_is_closed(content: tuple[Path, bytes], delay: float) -> None:
    path, _ = content
    draw = random.Random(5)
    pool, card = ReadPool(3, ALIGN), PlayedCard()
    asked = [Orders(UrgentSoundReads(pool, ArrivingScales([])), card, drawn(path, draw)) for _ in range(60)]
    for one in asked:
        one.bring()
    threading.Event().wait(delay)
    pool.close()
    assert [[key for key, _ in one.inbox.take(0.0)] for one in asked] == [["all"]] * 60


def test_one_call_sleeps_for_all_orders_and_has_kernels_wait_for_the_last(content: tuple[Path, bytes], tmp_path: Path) -> None:
    path, data = content
    late = tmp_path / "late"
    late.write_bytes(data)
    card = PlayedCard()
    with ReadPool(2, 2 * ALIGN) as pool:
        first = Orders(pool, card, [(Extent(late, 0, ALIGN, 0),), (Extent(path, 0, ALIGN, 5 * ALIGN),)])
        second = Orders(pool, card, [(Extent(path, 0, ALIGN, 0),)])
        second.carrier, second.inbox = first.carrier, first.inbox
        held = Held(pool, late)
        for one, events in ((first, [1, 2]), (second, [3])):
            one.order.carry(one.carrier, address_of(card.memory), array("q", events))
        brought = [(one.order, key, one.into, address_of(one.into)) for one, key in ((first, "first"), (second, "second"))]
        come = pool.bring(brought, first.inbox)
        assert held.begun.wait(HANGS_S)
        threading.Timer(0.05, held.go.set).start()
        until, part = time.monotonic() + HANGS_S, None
        while part is None:  # it sleeps a second at most, which a loaded machine may need for the timer alone
            assert time.monotonic() < until, "it has come"
            part = come(0.0)
        assert part == 0 and card.waits == [1], "the part that was held up"
        assert sorted(first.heard() + first.inbox.take(0.0)) == [("first", None), ("second", None)], "it stays to be heard of"


@pytest.mark.parametrize("why", ["error", "refused", "word", "copied later", "late"])
def test_where_not_all_has_just_come_nothing_waits_and_the_inbox_says_why(content: tuple[Path, bytes], tmp_path: Path, why: str) -> None:
    path, data = content
    late = tmp_path / "late"
    if why != "error":
        late.write_bytes(data)
    with orders([(Extent(path, 0, ALIGN, 0),), (Extent(late, 0, 77, 5 * ALIGN),)]) as (asked, pool):
        held = Held(pool, late) if why == "late" else None
        if why == "refused":
            asked.card.refuses = 77
        come = asked.bring()
        if why == "word":
            asked.inbox.put("word")
        after_s = time.perf_counter() + HANGS_S if why == "copied later" else 0.0
        assert come(after_s) is None and not asked.card.waits
        if held is not None:
            held.go.set()
        came = asked.heard()
        while ("all", None) not in came and not any(key == "all" for key, _ in came):
            came += asked.heard()
        ((_, error),) = [one for one in came if one[0] == "all"]
        assert (error is not None) == (why in ("error", "refused"))


def test_many_moves_are_queued_by_one_call(content: tuple[Path, bytes]) -> None:
    path, data = content
    with orders([(Extent(path, 0, ALIGN, 0),)]) as (asked, _):
        source, card = memoryview(bytearray(data)), asked.card
        words = [NativeCarrier.words([Segment(10, 0, 20), Segment(100, 20, 30)]), NativeCarrier.words([Segment(7, 3, 9)])]
        to = address_of(card.memory)
        begin = address_of(source)
        moves = array("q", (words[0].buffer_info()[0], 2, to, begin, words[1].buffer_info()[0], 1, to + 500, begin))
        asked.carrier.copy(moves, 9)
        assert card.memory[:50] == data[10:30] + data[100:130] and card.memory[503:512] == data[7:16] and card.events == [9]
        card.refuses = 9
        with pytest.raises(RuntimeError, match="CUDA error: to queue copies of experts returned 700"):
            asked.carrier.copy(moves, 10)
        assert card.events == [9]

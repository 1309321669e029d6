"""Hops by copies between cards that reach each other, played: lanes are threads, VRAM is memory of this process."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.runtime.hops.hop import HopMeter
from penstock.runtime.hops.peer_hop import ROUND, Channel, Incoming, Outgoing
from penstock.runtime.hops.peer_places import ONCE, ROUND_TRIP, PeerPlaces
from penstock.runtime.hops.peer_ways import PeerWays
from tests.cli import HANGS_S


class PlayedLane:
    """A stream: what it is given is done in order, on a thread of its own, some time later."""

    def __init__(self) -> None:
        self._given: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for each in iter(self._given.get, None):
            each()

    def follow(self) -> None:
        """Computing is this test itself: what was computed is there."""

    def copy(self, into: int, source: int, nbytes: int) -> None:
        self._given.put(lambda: ctypes.memmove(into, source, nbytes) and None)

    def wait_word(self, address: int, value: int) -> None:
        self._given.put(lambda: Here().wait_word(address, value))

    def write_word(self, address: int, value: int) -> None:
        self._given.put(lambda: Here().write_word(address, value))

    def mark(self) -> Callable[[], None]:
        done = threading.Event()
        self._given.put(done.set)
        return lambda: None if done.wait(HANGS_S) else pytest.fail("what was marked is not done")

    def settle(self) -> None:
        self.mark()()

    def close(self) -> None:
        self.settle()
        self._given.put(None)


class Here:
    """Computing is this test itself: what it is given is done at once, or by ``thread`` until that ends."""

    thread: threading.Thread | None = None

    def settle(self) -> None:
        if self.thread is not None:
            self.thread.join(HANGS_S)

    def wait_word(self, address: int, value: int) -> None:
        until, word = time.monotonic() + HANGS_S, ctypes.c_uint32.from_address(address)
        while (word.value - value) % ROUND >= ROUND // 2:
            assert time.monotonic() < until, "nobody wrote it"
            time.sleep(0)

    def write_word(self, address: int, value: int) -> None:
        ctypes.c_uint32.from_address(address).value = value

    def take(self, into: torch.Tensor, source: int) -> None:
        ctypes.memmove(into.data_ptr(), source, into.nbytes)


class PlayedVram:
    """A handle names an address of this process."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses, self.held, self.opened, self.gave_back_open = refuses, list[Any](), set[int](), False

    def take(self, nbytes: int) -> tuple[int, bytes]:
        if self.refuses == "take":
            raise RuntimeError("no memory")
        self.held.append(ctypes.create_string_buffer(nbytes))
        address = ctypes.addressof(self.held[-1])
        return address, address.to_bytes(8, "little")

    def open(self, handle: bytes) -> int:
        if self.refuses == "open":
            raise RuntimeError("these cards do not reach each other")
        self.opened.add(int.from_bytes(handle, "little"))
        return int.from_bytes(handle, "little")

    def leave(self) -> None:
        self.opened.clear()

    def give_back(self) -> None:
        self.held.clear()


class Table:
    """Where played ranks say what they have."""

    def __init__(self, count: int):
        self._barrier, self._said = threading.Barrier(count, timeout=HANGS_S), dict[int, Mapping[str, Any]]()

    def of(self, rank: int) -> Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]:
        def exchange(words: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
            self._said[rank] = dict(words)
            self._barrier.wait()
            said = [self._said[each] for each in sorted(self._said)]
            self._barrier.wait()
            return said

        return exchange


def together(count: int, each: Callable[[int], None]) -> None:
    raised: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            each(rank)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_S)
    if raised:
        raise raised[0]
    assert not any(thread.is_alive() for thread in threads)


def ring(count: int) -> list[tuple[int, int]]:
    return sorted({(rank, (rank + 1) % count) for rank in range(count)})


class NoWords(PlayedLane):
    """Of a driver that has none."""

    def wait_word(self, address: int, value: int) -> None:
        raise RuntimeError("no words")


def met(rank: int, count: int, table: Table, vram: PlayedVram, lane: type[PlayedLane] = PlayedLane, here: Here | None = None) -> PeerWays:
    return PeerWays(rank, PeerPlaces(count, ring(count)), table.of(rank), vram, None, lane, here or Here(), HopMeter())


@settings(max_examples=40, deadline=None)
@given(
    slots=st.integers(1, 4),
    slot_bytes=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 150), min_size=1, max_size=12),
    ahead=st.integers(1, 5),
    first=st.sampled_from([0, ROUND - 3, ROUND // 2 - 1]),
)
def test_what_is_sent_comes_in_order(slots: int, slot_bytes: int, sizes: list[int], ahead: int, first: int) -> None:
    """Whatever the sizes, whatever is asked for ahead, and where counts of 32 bits go round."""
    memory, words = ctypes.create_string_buffer(slots * slot_bytes), (ctypes.c_uint32 * 2)(first % ROUND, first % ROUND)
    addresses = [ctypes.addressof(memory) + number * slot_bytes for number in range(slots)]
    channel = Channel(addresses, slot_bytes, ctypes.addressof(words), ctypes.addressof(words) + 4)
    sender, receiver = Outgoing(channel, PlayedLane(), HopMeter()), Incoming(channel, PlayedLane(), Here(), meter := HopMeter())
    sender.pieces = receiver.pieces = slots * -(-first // slots) if first else 0
    words[0] = words[1] = sender.pieces % ROUND
    wanted = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    found = [torch.zeros_like(each) for each in wanted]
    coming = []
    for number, hidden in enumerate(wanted):
        sender.send(hidden)
        coming.append(receiver.coming(found[number]))
        if len(coming) == ahead:
            coming.pop(0)()
    for arrive in coming:
        arrive()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert (meter.received, meter.received_bytes) == (len(sizes), sum(sizes))


class StillLane(PlayedLane):
    """Does nothing of what it is given."""

    def wait_word(self, address: int, value: int) -> None: ...

    def copy(self, into: int, source: int, nbytes: int) -> None: ...

    def write_word(self, address: int, value: int) -> None: ...


@pytest.mark.parametrize("first", [0, ROUND - 1])
def test_what_is_sent_is_kept_until_the_word_says_that_it_is_gone(first: int) -> None:
    words = (ctypes.c_uint32 * 2)(first, first)
    channel = Channel([0], 8, ctypes.addressof(words), ctypes.addressof(words) + 4)
    sender = Outgoing(channel, StillLane(), HopMeter())
    sender.pieces = first
    alive = []
    for gone in (0, 0, 1, 2):
        words[0] = (first + gone) % ROUND
        hidden = torch.zeros(8, dtype=torch.uint8)
        alive.append(weakref.ref(hidden))
        sender.send(hidden)
        del hidden
    assert [one() is None for one in alive] == [True, True, False, False]
    sender.settle()
    assert all(one() is None for one in alive)


@pytest.mark.parametrize("count", [2, 3, 4])
def test_places_are_nobody_elses(count: int) -> None:
    places = PeerPlaces(count, ring(count))
    words = [begin for channel in places.channels for begin in places.words(channel)]
    assert len(set(words)) == len(words) and max(words) < places.word_bytes
    for rank in range(count):
        taken = sorted((begin, begin + key[2].slot_bytes) for key in places.channels if key[1] == rank for begin in places.slots(key))
        assert all(end <= begin for (_, end), (begin, _) in zip(taken, taken[1:], strict=False))
        assert taken[-1][1] <= places.vram_bytes(rank)


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_hand_on_what_they_get(count: int) -> None:
    """Twice round, more than fits the slots, and each to all others at last."""
    table, seen = Table(count), dict[int, list[torch.Tensor]]()
    sent = torch.arange(ROUND_TRIP.slot_bytes // 4 * 5, dtype=torch.int32)

    def rank(own: int) -> None:
        vram = PlayedVram()
        ways = met(own, count, table, vram)
        assert ways.refused is None
        before, behind = ways.before((own - 1) % count), ways.behind((own + 1) % count)
        for _ in range(2):
            if own == 0:
                behind.send(sent)
            before.receive(into := torch.empty_like(sent))
            if own:
                behind.send(into)
        for other in range(count):
            if other != own:
                ways.of(other).send(torch.tensor([own], dtype=torch.int32))
        heard = [torch.zeros(1, dtype=torch.int32) for _ in range(count - 1)]
        for other, one in zip((other for other in range(count) if other != own), heard, strict=True):
            ways.of(other).receive(one)
        seen[own] = [into, *heard]
        ways.close()
        ways.close()
        assert not vram.opened and not vram.held

    together(count, rank)
    for own, (into, *heard) in seen.items():
        assert torch.equal(into, sent)
        assert [int(one) for one in heard] == [other for other in range(count) if other != own]


@pytest.mark.parametrize("how", ["take", "open", "wait"])
def test_what_one_rank_cannot_none_does(how: str) -> None:
    table, refused = Table(3), dict[int, str | None]()

    def rank(own: int) -> None:
        vram = PlayedVram(how if own == 1 else "")
        refused[own] = met(own, 3, table, vram, NoWords if (how, own) == ("wait", 1) else PlayedLane).refused
        assert not vram.opened and not vram.held

    together(3, rank)
    why = {"take": "rank 1: no memory", "open": "rank 1: these cards do not reach each other", "wait": "rank 1: no words"}[how]
    assert refused == dict.fromkeys(range(3), why)


def test_a_card_that_waits_for_a_rank_that_is_gone_goes_on() -> None:
    """Both ways: for what does not come, and for slots that nobody empties."""
    table, ways, here = Table(2), dict[int, PeerWays](), Here()

    def rank(own: int) -> None:
        ways[own] = met(own, 2, table, PlayedVram(), here=Here() if own else here)

    together(2, rank)
    left = ways[0]
    for _ in range(ROUND_TRIP.slots + 2):
        left.behind(1).send(torch.zeros(ROUND_TRIP.slot_bytes, dtype=torch.uint8))
    arrives = [left.of(1).coming(torch.zeros(3, dtype=torch.uint8)) for _ in range(ONCE.slots + 1)]
    here.thread = threading.Thread(target=lambda: [arrive() for arrive in arrives], daemon=True)
    here.thread.start()
    left.close(broken=True)
    assert not here.thread.is_alive()

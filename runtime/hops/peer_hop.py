"""Hops between cards that reach each other: the sender's copy engine writes to the receiver's VRAM, in an order that words keep.

No kernel waits for a hop, so none takes multiprocessors from the products beside it, as NCCL's do. A channel goes one way. It has slots in
the receiver's VRAM and two words in page-locked memory of the host, each counting pieces of at most a slot's bytes:

    sender    waits until `taken` is so many slots behind; copies piece n into slot n mod slots; sent = n + 1
    receiver  waits until `sent` is n + 1; copies the slot to where the piece belongs; taken = n + 1

Both go by streams of their own beside the one that computes. What fits a slot is taken from there by the stream that computes: a host
that launches slowly is asked for three things in place of seven, and no event lies between the word and who waits for it. Counts are of 32
bits and go round: what is compared is their difference.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from penstock.runtime.hops.hop import HopMeter

ROUND = 1 << 32
"""Counts of a word."""


class Lane(Protocol):
    """A card's stream beside the one that computes: ``hops.card_lane.CardLane``."""

    def follow(self) -> None:
        """What it is given next begins behind what computing was given so far."""

    def copy(self, into: int, source: int, nbytes: int) -> None: ...

    def wait_word(self, address: int, value: int) -> None:
        """What it is given next begins once the word is ``value`` or ahead of it."""

    def write_word(self, address: int, value: int) -> None:
        """Behind all that it was given so far."""

    def mark(self) -> Callable[[], None]:
        """What is returned has computing wait for all that this lane was given before the mark; to be called once."""

    def settle(self) -> None:
        """Return when all that it was given is done."""

    def close(self) -> None:
        """The same, and nothing is given to it any more."""


class Computing(Protocol):
    """The stream that computes: ``hops.computing_stream.ComputingStream``."""

    def wait_word(self, address: int, value: int) -> None: ...
    def write_word(self, address: int, value: int) -> None: ...

    def take(self, into: torch.Tensor, source: int) -> None:
        """Fill ``into`` with what lies from address ``source`` on in this card's VRAM."""

    def settle(self) -> None:
        """Return when all that it was given is done."""


@dataclass(frozen=True)
class Channel:
    """Addresses of a channel as this process has them; ``slots`` are of ``slot_bytes`` each."""

    slots: Sequence[int]
    slot_bytes: int
    sent: int
    taken: int

    def pieces(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """(where it begins, bytes) of each piece of ``nbytes``."""
        return ((begin, min(self.slot_bytes, nbytes - begin)) for begin in range(0, nbytes, self.slot_bytes))


class Outgoing:
    """The sender's end of ``channel``."""

    def __init__(self, channel: Channel, lane: Lane, meter: HopMeter):
        self._channel, self.lane, self._meter = channel, lane, meter
        self.pieces = 0
        """That were given to the lane."""
        self._gone = ctypes.c_uint32.from_address(channel.sent)
        self._kept: deque[tuple[int, torch.Tensor]] = deque()
        """Hidden states whose memory is nobody else's yet, each with the pieces that are gone once it is."""

    def rehearse(self, source: int) -> None:
        """All that a hop takes of the driver, before the first one: a byte from address ``source``, and words as they are. RuntimeError
        where it is refused."""
        self.lane.wait_word(self._channel.taken, 0)
        self.lane.copy(self._channel.slots[0], source, 1)
        self.lane.write_word(self._channel.sent, 0)
        self.lane.settle()

    def send(self, hidden: torch.Tensor) -> None:
        channel, lane, hidden = self._channel, self.lane, hidden.contiguous()
        lane.follow()
        source = hidden.data_ptr()
        for begin, nbytes in channel.pieces(hidden.nbytes):
            lane.wait_word(channel.taken, (self.pieces + 1 - len(channel.slots)) % ROUND)
            lane.copy(channel.slots[self.pieces % len(channel.slots)], source + begin, nbytes)
            self.pieces += 1
            lane.write_word(channel.sent, self.pieces % ROUND)
        self._keep(hidden)
        self._meter.sent_bytes += hidden.nbytes

    def _keep(self, hidden: torch.Tensor) -> None:
        """The word says without the driver which pieces are gone."""
        self._kept.append((self.pieces, hidden))
        gone = self._gone.value
        while self._kept and (gone - self._kept[0][0]) % ROUND < ROUND // 2:
            self._kept.popleft()

    def settle(self) -> None:
        """Return when all that was sent is gone."""
        self.lane.settle()
        self._kept.clear()


class Incoming:
    """The receiver's end of ``channel``: by ``lane``, or by ``computing`` where a slot holds all of it."""

    def __init__(self, channel: Channel, lane: Lane, computing: Computing, meter: HopMeter):
        self._channel, self.lane, self._computing, self._meter = channel, lane, computing, meter
        self.pieces = 0
        """That were asked for."""
        self._later = 0
        """Hops asked for that begin when they are to arrive: what comes behind them cannot be brought before, for the sender counts what
        was taken, not which."""

    def coming(self, into: torch.Tensor) -> Callable[[], None]:
        """ValueError for memory in several pieces."""
        if not into.is_contiguous():
            raise ValueError("hidden states come into memory of one piece")
        if into.nbytes <= self._channel.slot_bytes:
            self.pieces += 1
            self._later += 1
            return partial(self._take, into, self.pieces)
        first, self.pieces = self.pieces, self.pieces + len(list(self._channel.pieces(into.nbytes)))
        mark = None if self._later else self._brought(into, first)
        self._later += mark is None

        def arrive() -> None:
            (mark or self._brought(into, first))()
            self._later -= mark is None
            self._count(into)

        return arrive

    def _take(self, into: torch.Tensor, number: int) -> None:
        """Have computing take the piece ``number``, counted from 1, as its next one."""
        channel, computing = self._channel, self._computing
        computing.wait_word(channel.sent, number % ROUND)
        computing.take(into, channel.slots[(number - 1) % len(channel.slots)])
        computing.write_word(channel.taken, number % ROUND)
        self._later -= 1
        self._count(into)

    def _brought(self, into: torch.Tensor, first: int) -> Callable[[], None]:
        """Have the lane bring pieces from ``first`` on -> what has computing wait for them."""
        channel, lane = self._channel, self.lane
        lane.follow()
        for number, (begin, nbytes) in enumerate(channel.pieces(into.nbytes), first):
            lane.wait_word(channel.sent, (number + 1) % ROUND)
            lane.copy(into.data_ptr() + begin, channel.slots[number % len(channel.slots)], nbytes)
            lane.write_word(channel.taken, (number + 1) % ROUND)
        return lane.mark()

    def _count(self, into: torch.Tensor) -> None:
        self._meter.received += 1
        self._meter.received_bytes += into.nbytes


class PeerHop:
    """``hops.hop.Hop`` to and from one peer; None where nothing goes that way."""

    def __init__(self, outgoing: Outgoing | None, incoming: Incoming | None):
        self._outgoing, self._incoming = outgoing, incoming

    def receive(self, into: torch.Tensor) -> None:
        self.coming(into)()

    def coming(self, into: torch.Tensor) -> Callable[[], None]:
        assert self._incoming is not None, "nothing comes this way"
        return self._incoming.coming(into)

    def send(self, hidden: torch.Tensor) -> None:
        assert self._outgoing is not None, "nothing goes this way"
        self._outgoing.send(hidden)

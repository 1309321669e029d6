"""All channels of a rank to and from the cards of other ranks of its host, once every rank can have them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from penstock.runtime.hops.hop import HopMeter
from penstock.runtime.hops.kept_words import KeptWords
from penstock.runtime.hops.peer_hop import ROUND, Channel, Computing, Incoming, Lane, Outgoing, PeerHop
from penstock.runtime.hops.peer_places import ONCE, ROUND_TRIP, Key, PeerPlaces
from penstock.runtime.hops.shared_memory import Shared, SharedMemory
from penstock.runtime.memory.arena import PageLock

_SAID = 200
"""Characters in which a rank says why it cannot."""
Exchange = Callable[[Mapping[str, Any]], Sequence[Mapping[str, Any]]]
"""What a rank has to say -> what each rank said, in their order, once all have."""


class Handles(Protocol):
    """``memory.vram_handles.VramHandles``."""

    def take(self, nbytes: int) -> tuple[int, bytes]: ...
    def open(self, handle: bytes) -> int: ...
    def leave(self) -> None: ...
    def give_back(self) -> None: ...


class PeerWays:
    """Of ``rank`` among those of ``places``. All ranks make theirs at the same time, and close them so, unless one is gone.

    Takes ``places.vram_bytes(rank)`` of VRAM. ``refused`` says why no rank has them: then nothing is taken and nothing opened.
    """

    def __init__(
        self,
        rank: int,
        places: PeerPlaces,
        exchange: Exchange,
        handles: Handles,
        lock: PageLock | None,
        lane: Callable[[], Lane],
        computing: Computing,
        meter: HopMeter,
    ):
        self.rank, self._places, self._exchange, self._handles, self._computing = rank, places, exchange, handles, computing
        self._words: SharedMemory | None = None
        self._outgoing: dict[Key, Outgoing] = {}
        self._incoming: dict[Key, Incoming] = {}
        self._kept = KeptWords(self._keep)
        own: dict[str, Any] = {"why": None}
        try:
            address, handle = handles.take(places.vram_bytes(rank))
            own["handle"] = handle.hex()
            if rank == 0:
                self._words = SharedMemory(places.word_bytes, lock)
                own["words"] = list(self._words.shared)
        except (OSError, RuntimeError) as error:
            own["why"] = str(error)[:_SAID]
        said = exchange(own)
        self.refused = _first(said)
        if self.refused is None:
            try:
                self._words = self._words or SharedMemory(Shared(*said[0]["words"]), lock)
                slots = {r: handles.open(bytes.fromhex(each["handle"])) for r, each in enumerate(said) if r != rank} | {rank: address}
                self._connect(slots, self._words.bytes.data_ptr(), lane, computing, meter)
                for each in self._outgoing.values():
                    each.rehearse(address)
            except (OSError, RuntimeError) as error:
                own["why"] = str(error)[:_SAID]
            self.refused = _first(exchange(own))
        if self.refused is not None:
            with contextlib.suppress(RuntimeError):  # of the same driver that has refused
                self._close_lanes()
            self._handles.leave()
            exchange({})
            self._give_back()

    def _connect(self, vram: Mapping[int, int], words: int, lane: Callable[[], Lane], computing: Computing, meter: HopMeter) -> None:
        """``vram`` and ``words``: where what each rank took, and the words, begin in this process."""
        for key in self._places.channels:
            sender, receiver, kind = key
            sent, taken = (words + begin for begin in self._places.words(key))
            channel = Channel([vram[receiver] + begin for begin in self._places.slots(key)], kind.slot_bytes, sent, taken)
            if sender == self.rank:
                self._outgoing[key] = Outgoing(channel, lane(), meter)
            elif receiver == self.rank:
                self._incoming[key] = Incoming(channel, lane(), computing, meter)

    def before(self, peer: int) -> PeerHop:
        """From ``peer``, which has a layer before one of ours."""
        return PeerHop(None, self._incoming[peer, self.rank, ROUND_TRIP])

    def behind(self, peer: int) -> PeerHop:
        """To ``peer``, which has a layer behind one of ours."""
        return PeerHop(self._outgoing[self.rank, peer, ROUND_TRIP], None)

    def of(self, peer: int) -> PeerHop:
        """To and from any rank."""
        return PeerHop(self._outgoing[self.rank, peer, ONCE], self._incoming[peer, self.rank, ONCE])

    def settle(self) -> None:
        """Return when all that was sent has gone."""
        for each in self._outgoing.values():
            each.settle()

    def let_go(self) -> None:
        """Others are gone: have this rank's card go on, whatever it waits for, until :meth:`close`. What comes means nothing."""
        if self._words is not None:
            self._kept.start()

    def _keep(self) -> None:
        """All has been sent, and all was taken, that lanes of this rank wait for."""
        assert self._words is not None, "words are there as long as they are kept"
        words = self._words.bytes.view(torch.int32)
        for key, incoming in self._incoming.items():
            words[self._places.words(key)[0] // 4] = _signed(incoming.pieces)
        for key, outgoing in self._outgoing.items():
            words[self._places.words(key)[1] // 4] = _signed(outgoing.pieces)

    def close(self, broken: bool = False) -> None:
        """Give all back. ``broken``: another rank is gone. A second call does nothing."""
        if self._words is None:
            return
        if broken:
            self.let_go()
        self._close_lanes()
        self._handles.leave()
        if not broken:
            self._exchange({})
        self._kept.close()
        self._give_back()

    def _close_lanes(self) -> None:
        self._computing.settle()  # it may be waiting for words, too
        for lane in [*(each.lane for each in self._outgoing.values()), *(each.lane for each in self._incoming.values())]:
            lane.close()

    def _give_back(self) -> None:
        """The others have left it, or are gone."""
        self._outgoing.clear()
        self._incoming.clear()
        self._handles.give_back()
        if self._words is not None:
            self._words.close()
            self._words = None


def _first(said: Sequence[Mapping[str, Any]]) -> str | None:
    """Why the first rank that cannot does not; None where all can."""
    return next((f"rank {rank}: {each['why']}" for rank, each in enumerate(said) if each["why"] is not None), None)


def _signed(count: int) -> int:
    """``count`` as a word of 32 bits with a sign has it."""
    return (count + ROUND // 2) % ROUND - ROUND // 2

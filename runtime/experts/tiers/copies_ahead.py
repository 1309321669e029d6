"""Experts that come to VRAM ahead of their routers, chunk by chunk."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import length_hint

from penstock.planner.contract.experts.expert_cache import ExpertCache
from penstock.runtime.experts.tiers.dram_experts import DramExperts
from penstock.runtime.experts.tiers.expert_copies import Pieces
from penstock.runtime.experts.tiers.expert_fetch import Key
from penstock.runtime.experts.tiers.expert_stats import Deciding, TierStats
from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.memory.pieces import Segment, cut
from penstock.runtime.moving.device_layout import DeviceLayout


@dataclass(eq=False)
class Ahead:
    """An expert that is fetched ahead from a slot in DRAM: what of it is still to be queued."""

    key: Key
    slot: int
    dram_slot: int
    chunks: deque[Segment]


class CopiesAhead:
    """Queues by ``copy`` what ``cache`` wants next and ``dram`` has: chunks of ``chunk_bytes``, of which ``in_flight`` are in flight at
    most. So a missing expert waits for no more than these."""

    def __init__(
        self, layouts: Mapping[Key, DeviceLayout], cache: ExpertCache, dram: DramExperts, device: CopyDevice,
        copy: Callable[[Key, int, int, Pieces], Event], stats: TierStats, chunk_bytes: int, in_flight: int,
    ):  # fmt: skip
        self._layouts, self._cache, self._dram, self._device, self._copy = layouts, cache, dram, device, copy
        self._stats, self._deciding = stats, Deciding(stats)
        self._chunk_bytes, self._in_flight = chunk_bytes, in_flight
        self._coming: dict[Key, Ahead] = {}
        self._under_way: deque[Event] = deque()
        self._most_queued, self._most_bytes = float(in_flight), chunk_bytes
        self._fetched: set[Key] = set()
        """Experts whose router has not spoken."""
        self._wanted: Iterator[Key] | None = None

    def close(self) -> None:
        """Nothing is begun any more, or gone on with."""
        self._wanted = None
        self._coming.clear()

    def finish(self, layer: int, hits: Sequence[int]) -> list[int]:
        """The router of ``layer`` has spoken: begin nothing more, and queue what is left of its experts. Which of ``hits`` these are."""
        self._wanted = None
        begun = {key: self._coming.pop(key) for key in [*self._coming] if key[0] == layer} if self._coming else {}
        partly = [e for e in hits if (layer, e) in begun] if begun else []
        for expert in partly:
            self._queue(begun[layer, expert], len(begun[layer, expert].chunks))
        if self._fetched:
            self._stats.ahead_used += len([e for e in hits if (layer, e) in self._fetched])
            self._fetched = {key for key in self._fetched if key[0] != layer}
        return partly

    def look(self, layer: int, experts: Collection[int]) -> None:
        """``layer`` uses ``experts``: begin to fetch what may be next."""
        if self._cache.still:
            return
        with self._deciding:
            wanted = self._cache.coming(layer, len(experts))
        self._wanted = wanted if length_hint(wanted, 1) else None
        if not self._goes_on:
            return
        certain = self._cache.is_dense(len(experts)) and not self._cache.is_last(layer)  # the pass after this one may be a step
        self._most_queued, self._most_bytes = (math.inf, sys.maxsize) if certain else (self._in_flight, self._chunk_bytes)
        self.go_on()

    def go_on(self) -> None:
        """Queue chunks while fewer than ``in_flight`` are in flight. If the coming layer needs all its experts, queue as many as have
        slots, each in one piece. Never blocks; called wherever the host passes by."""
        if not self._goes_on:
            return
        while self._under_way and self._device.done(self._under_way[0]):
            self._under_way.popleft()
        while len(self._under_way) < self._most_queued:
            coming = self._next()
            if coming is None:
                return
            self._under_way.append(self._queue(coming, 1))
            if not coming.chunks:
                del self._coming[coming.key]

    @property
    def _goes_on(self) -> bool:
        """Whether anything may still be fetched ahead."""
        return self._wanted is not None or bool(self._coming)

    @property
    def meanwhile(self) -> Callable[[], None] | None:
        """What is to be done again and again while the host waits for the SSD, which gives no slot back; None for nothing."""
        return self.go_on if self._coming or (self._wanted is not None and self._cache.room_ahead) else None

    def _next(self) -> Ahead | None:
        """What is being fetched ahead, or else the next that can be: it lies in DRAM, and a demand would still find a slot."""
        for coming in self._coming.values():
            return coming
        while self._wanted is not None and self._cache.room_ahead:
            with self._deciding:
                key = next(self._wanted, None)
            if key is None:
                self._wanted = None
            elif self._dram.here(*key):
                self._stats.fetched_ahead()
                self._fetched.add(key)
                dram_slot, _ = self._dram.place(*key)
                chunks = deque(cut(self._layouts[key].segments, self._most_bytes))
                slot = self._cache.take(*key)
                assert slot is not None, "there was room ahead"
                self._coming[key] = Ahead(key, slot, dram_slot, chunks)
                return self._coming[key]
        return None

    def _queue(self, coming: Ahead, most: int) -> Event:
        chunks = [coming.chunks.popleft() for _ in range(most)]
        return self._copy(coming.key, coming.slot, coming.dram_slot, Pieces.of(chunks))

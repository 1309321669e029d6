"""One tier's slots for routed experts, without bytes: the runtime's cache, filled piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.planner.contract.experts.expert_cache import ExpertCache, Routing
from penstock.planner.simulate.lanes.lanes import Lanes, Work

Key = tuple[int, int]
"""(decoder layer, expert)."""


@dataclass(eq=False)
class _Coming:
    """An expert on its way into a tier: ``allowed`` pieces of it may move, ``left`` have not arrived."""

    key: Key
    slot: int
    left: int
    allowed: int
    demanded: bool
    late_ns: int = 0
    """By which the next piece takes longer."""
    submitted: int = 0
    under_way: int = 0
    dropped: bool = False


@dataclass
class TierCounts:
    """As a run's report has them."""

    hits: int = 0
    misses: int = 0
    ahead: int = 0
    ahead_used: int = 0


class SimulatedTier:
    """One tier's slots. What is demanded moves at once, what is fetched ahead ``in_flight`` pieces at a time. ``arrived`` gets every
    piece: (key, whether it was the last)."""

    def __init__(
        self, cache: ExpertCache, track: str, piece_ns: int, piece_bytes: int, pieces: int, in_flight: int, lanes: Lanes,
        in_order: bool, arrived: Callable[[Key, bool], None] = lambda key, last: None,
    ):  # fmt: skip
        """``in_order``: what moves to a slot is queued behind all that moved there before, so that a slot is free at once."""
        self.cache, self.pieces = cache, pieces
        self.counts = TierCounts()
        self.ahead: set[Key] = set()
        self.coming: dict[Key, _Coming] = {}
        self._track, self._piece_ns, self._piece_bytes, self._in_flight = track, piece_ns, piece_bytes, in_flight
        self._lanes, self._arrived, self._in_order = lanes, arrived, in_order

    def visit(self, layer: int, routing: Routing, wanted: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(hits, misses) of ``wanted``; what was fetched ahead in vain is dropped, what comes is demanded now."""
        seen = self.cache.find(layer, wanted)
        self.cache.judge(layer, routing)
        self.counts.hits += len(seen.hits)
        self.counts.misses += len(seen.misses)
        under_way = {coming.slot: coming for coming in self.coming.values()}
        for slot in seen.dropped:
            self._drop(slot, under_way.get(slot))
        self.counts.ahead_used += len({(layer, e) for e in seen.hits} & self.ahead)
        self.ahead = {key for key in self.ahead if key[0] != layer}
        for expert in seen.hits:
            coming = self.coming.get((layer, expert))
            if coming is not None:
                coming.demanded = True
                self._submit(coming)
        return seen.hits, seen.misses

    def here(self, key: Key) -> bool:
        return self.cache.slot(*key) is not None and key not in self.coming

    def begin(self, key: Key, demanded: bool, allowed: int, late_ns: int = 0) -> bool:
        """Let ``key`` come, ``allowed`` pieces of it at first, the first one ``late_ns`` later; False while no slot is free."""
        slot = self.cache.take(*key)
        if slot is None:
            return False
        coming = self.coming[key] = _Coming(key, slot, self.pieces, allowed, demanded, late_ns)
        if not demanded:
            self.ahead.add(key)
            self.counts.ahead += 1
        self._submit(coming)
        return True

    def allow(self, key: Key) -> None:
        """One piece more of ``key`` may move."""
        self.coming[key].allowed += 1
        self._submit(self.coming[key])

    def settle(self, key: Key) -> None:
        """``key`` was used: it is kept, or its slot is free."""
        for slot in self.cache.settle(*key):
            self.cache.give_back(slot)

    def _submit(self, coming: _Coming) -> None:
        while coming.submitted < coming.allowed and not coming.dropped and (coming.demanded or coming.under_way < self._in_flight):
            coming.submitted += 1
            coming.under_way += 1
            layer, expert = coming.key
            work = Work(("expert", layer, expert), f"expert.{layer}.{expert}", self._piece_bytes, partial(self._landed, coming))
            late_ns, coming.late_ns = coming.late_ns, 0
            self._lanes.add(self._track, work, self._piece_ns + late_ns)

    def _landed(self, coming: _Coming) -> None:
        coming.under_way -= 1
        coming.left -= 1
        if coming.dropped:
            if not coming.under_way and not self._in_order:
                self.cache.give_back(coming.slot)
            return
        if not coming.left:
            del self.coming[coming.key]
        self._submit(coming)
        self._arrived(coming.key, not coming.left)

    def _drop(self, slot: int, coming: _Coming | None) -> None:
        if coming is not None:
            coming.dropped = True
            del self.coming[coming.key]
        if coming is None or not coming.under_way or self._in_order:
            self.cache.give_back(slot)

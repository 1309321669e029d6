"""The DRAM tier: a layer cache over arena slots, and the LM head's and embedding's fixed regions."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from penstock.planner.common.measures import align_up
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.placement import Placement, Unit
from penstock.planner.contract.policy import LayerPolicy
from penstock.runtime.memory.arena import Arena
from penstock.runtime.moving.dram_cache import LayerCache
from penstock.runtime.reading.reader import Reads
from penstock.runtime.store.base import Extent, UnitLayout


@dataclass(frozen=True)
class LayerPlan:
    """How one layer's streamed units lie in a cache slot."""

    units: tuple[Unit, ...]
    offsets: Mapping[Unit, int]
    extents: tuple[Extent, ...]
    nbytes: int


def layer_plan(units: tuple[Unit, ...], layouts: Mapping[Unit, UnitLayout]) -> LayerPlan:
    """Lay ``units`` one after the other in a slot, each 4096-aligned as its layout demands."""
    offsets: dict[Unit, int] = {}
    extents: list[Extent] = []
    at = 0
    for unit in units:
        offsets[unit] = at
        extents += [replace(e, dest=e.dest + at) for e in layouts[unit].extents]
        at += align_up(layouts[unit].nbytes)
    return LayerPlan(units, offsets, tuple(extents), at)


def layer_plans(placement: Placement, layouts: Mapping[Unit, UnitLayout]) -> dict[int, LayerPlan]:
    """How each layer that passes through DRAM lies in a slot; units that live in VRAM take no part."""
    plans = {}
    for layer in placement.dram_layers:
        units = (Unit("attn", layer), placement.attn[layer]), (Unit("ffn", layer), placement.ffn[layer])
        plans[layer] = layer_plan(tuple(u for u, tier in units if tier is not Tier.vram and placement.unit_bytes(u)), layouts)
    return plans


class DramTier:
    """Hands out a unit's bytes in DRAM: ``acquire`` blocks until they have arrived, ``release`` says that they were used.

    Layers pass through the cache's slots, which lie in the arena from ``base`` on; LM-head blocks lie still in ``heads``. One
    consumer acquires units in forward order; they are given back in any order, but each unit's visits in theirs.
    """

    def __init__(
        self,
        placement: Placement,
        layouts: Mapping[Unit, UnitLayout],
        arena: Arena,
        base: int,
        pool: Reads,
        policy: LayerPolicy,
        heads: Mapping[Unit, torch.Tensor],
        say: Callable[[str], None] | None = None,
        keep_log: bool = False,
    ):
        self._arena = arena
        self._base = base
        self._pool = pool
        self._heads = heads
        self._plans = layer_plans(placement, layouts)
        self.slot_bytes = max((plan.nbytes for plan in self._plans.values()), default=0)
        self._slot_of: dict[int, int] = {}
        self._given_back: Counter[Unit] = Counter()
        self._giving_back = threading.Lock()
        self.layers = placement.dram_layers
        self.slots = placement.dram_slots
        self.cache = LayerCache(policy, placement.dram_slots, self.read_into, say, keep_log)

    @staticmethod
    def nbytes(placement: Placement, layouts: Mapping[Unit, UnitLayout]) -> int:
        """Arena bytes that the slots of such a tier take."""
        return placement.dram_slots * max((plan.nbytes for plan in layer_plans(placement, layouts).values()), default=0)

    def arrived(self, unit: Unit) -> bool:
        """Whether :meth:`acquire` would return ``unit``, the next one, at once."""
        return unit.kind == "head" or unit != self._plans[unit.layer].units[0] or self.cache.holds(unit.layer)

    def stays(self, unit: Unit) -> torch.Tensor:
        """The buffer of ``unit``, which never leaves DRAM and may not have arrived."""
        if unit.kind == "head":
            return self._heads[unit]
        return self._buffer(unit, self.cache.slot_of(unit.layer))

    def acquire(self, unit: Unit) -> tuple[int, torch.Tensor]:
        """(slot, uint8 buffer of the unit's layout). Valid until the unit's :meth:`release`; slot -1 is a fixed region."""
        if unit.kind == "head":
            return -1, self._heads[unit]
        plan = self._plans[unit.layer]
        if unit == plan.units[0]:
            self._slot_of[unit.layer] = self.cache.acquire(unit.layer)
        slot = self._slot_of[unit.layer]
        return slot, self._buffer(unit, slot)

    def _buffer(self, unit: Unit, slot: int) -> torch.Tensor:
        plan = self._plans[unit.layer]
        start = self._base + slot * self.slot_bytes + plan.offsets[unit]
        return self._arena.slice(start, plan.nbytes - plan.offsets[unit])

    def release(self, unit: Unit) -> None:
        """The consumer no longer reads the unit's buffer. A layer is left when the last of its units was given back. Any
        thread."""
        if unit.kind == "head":
            return
        units = self._plans[unit.layer].units
        with self._giving_back:
            visits = min(self._given_back[u] for u in units)
            self._given_back[unit] += 1
            is_left = min(self._given_back[u] for u in units) > visits
        if is_left:
            self.cache.release(unit.layer)

    def preload(self, source: Reads) -> None:
        """Start filling the cache from ``source``."""
        self.cache.preload(wait=False, read=partial(self.read_into, source=source))

    def read_into(self, layer: int, slot: int, done: Callable[[BaseException | None], None], source: Reads | None = None) -> None:
        """Start reading ``layer`` into ``slot``, past the page cache where no ``source`` is named; ``done(error)`` is called from a
        reader's thread."""
        start = self._base + slot * self.slot_bytes
        into = self._arena.view[start : start + self.slot_bytes]
        (source or self._pool).read(self._plans[layer].extents, into, done, f"layer {layer}")

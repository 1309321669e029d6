"""Small tiers of experts whose bytes tell whose they are, under policies that judge at random."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from penstock.planner.common.measures import ALIGN
from penstock.planner.contract.experts.expert_cache import ExpertCache, Routing
from penstock.planner.contract.experts.expert_caches import LIKELY
from penstock.planner.contract.experts.expert_slots import kept_slots
from penstock.planner.contract.experts.policies import FarSight
from penstock.planner.contract.experts.prefetch import Prefetch
from penstock.planner.contract.given.model import Experts
from penstock.runtime.experts.card_experts import CardExperts
from penstock.runtime.experts.expert_forward import Arrived, ExpertSource
from penstock.runtime.experts.host_experts import ComputeClock
from penstock.runtime.experts.products.beside_card import Made
from penstock.runtime.experts.tiers.dram_experts import DramExperts, slot_bytes
from penstock.runtime.memory.arena import Arena
from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.moving.device_layout import device_layout
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.reading.reader import ReadPool
from tests.runtime.fakes import FakeDevice

COUNT, TOP_K, LAYERS, ELEMENTS = 6, 2, (1, 2, 4, 5, 7, 8), 3000
"""Experts a layer; an expert is two tensors of ``ELEMENTS`` floats that say whose they are."""
EXPERTS = Experts(COUNT, TOP_K, 8 * ELEMENTS, LAYERS, tuple(n / COUNT for n in range(COUNT + 1)))


class Whims:
    """A policy that judges at random."""

    needs_ahead = None

    def __init__(self, seed: int):
        self._random = np.random.default_rng(seed)

    def observe(self, layer: int, experts: Sequence[int], ahead: np.ndarray | None = None) -> None:
        assert len(set(experts)) == len(experts)

    def study(self, layer: int, routed: np.ndarray) -> None:
        assert routed.ndim == 2

    def worth(self, layer: int) -> np.ndarray:
        return self._random.random(COUNT)

    def foresee(self, layer: int) -> np.ndarray:
        return self._random.random(COUNT)


class FarWhims(FarSight):
    """Names experts of farther layers at random."""

    def __init__(self, seed: int):
        super().__init__(len(LAYERS), COUNT, TOP_K)
        self._random = random.Random(seed)

    def named(self, layer: int, most: int) -> list[tuple[int, int]]:
        drawn = [(place, e) for place in range(layer + 2, len(LAYERS)) for e in self._random.sample(range(COUNT), min(most, COUNT))]
        return [name for name in drawn if self._random.random() < 0.5]


class Clock:
    def pause(self) -> None: ...

    def idle(self) -> None: ...

    def resume(self, arrival: Event | None = None) -> None: ...


def value(layer: int, expert: int, tensor: int) -> float:
    return layer * 100.0 + expert + tensor / 4


@contextmanager
def dram_tier(layouts: dict, slots: int, seed: int, above: ExpertCache | None, preload: bool, ahead: int = 2) -> Iterator[DramExperts]:
    arena = Arena(slots * slot_bytes(layouts))
    arena.occupy(None)
    pool = ReadPool(2, ALIGN)
    cache = ExpertCache(kept_slots(EXPERTS, slots), slots, COUNT, Whims(seed), above, FarWhims(seed), Prefetch(ahead, LIKELY))
    dram = DramExperts(layouts, arena, 0, cache, pool, 2 * ALIGN, 2)
    try:
        for arrival, _ in dram.preload(pool) if preload else ():
            arrival.wait()
        yield dram
    finally:
        dram.close()
        pool.close()
        arena.close()


def routings(seed: int, visits: int) -> Iterator[tuple[int, Routing]]:
    """Layers in order, each visited by a few experts or by all."""
    draw = random.Random(seed)
    for k in range(visits):
        dense = draw.random() < 0.3
        chosen = np.array([draw.sample(range(COUNT), COUNT if dense else draw.randint(1, COUNT))])
        yield LAYERS[k % len(LAYERS)], Routing(chosen, prompt=dense)


def uses(seed: int, visits: int) -> int:
    return sum(len(routing.experts) for _, routing in routings(seed, visits))


def check(layer: int, expert: int, parameters: dict[str, torch.Tensor]) -> None:
    for t in (0, 1):
        assert parameters[f"t{t}"].unique().tolist() == [value(layer, expert, t)]


def card_tier(
    layouts: dict, vram: int, dram: DramExperts, cache: ExpertCache, device: CopyDevice,
    clock: ComputeClock | None = None, chunk_bytes: int = 2 * ALIGN,
) -> CardExperts:  # fmt: skip
    placed = {key: device_layout(layout) for key, layout in layouts.items()}
    slots = [torch.zeros(max(x.nbytes for x in placed.values()), dtype=torch.uint8) for _ in range(vram)]
    return CardExperts(placed, slots, cache, dram, device, clock or Clock(), Ledger(), chunk_bytes, 2)


def each_of(source: ExpertSource, layer: int, routing: Routing) -> Iterator[Arrived]:
    """One after the other."""
    for (one,) in source.visit(layer, routing, lambda experts: 1):
        assert not isinstance(one, Made)
        yield one


def arrivals(card: CardExperts, layer: int, routing: Routing, together: bool) -> Iterator[Arrived]:
    """At most three at a time, or by groups."""
    if not together:
        for few in card.visit(layer, routing, lambda experts: min(len(experts), 3)):
            yield from few
        return
    for group in card.groups(layer, routing):
        group.come()
        yield from group.arrived


def compute_in_any_order(card: CardExperts, device: FakeDevice, draw: random.Random, seed: int, together: bool) -> None:
    """Twelve visits, whose kernels look at the bytes when they run. Copies and kernels are done in an order that ``draw`` chooses among
    those that streams and events allow."""
    ran: list[tuple[int, int]] = []
    for layer, routing in routings(seed, 12):
        device.finish("compute", draw.choice)  # the router's choice was read back
        for expert, parameters in arrivals(card, layer, routing, together):
            device.launch(lambda k=(layer, expert), p=parameters: (check(*k, p), ran.append(k)))
        for _ in range(draw.randint(0, 3)):
            if device.enabled():
                device.advance(draw.choice(device.enabled()))
            card.fetch_ahead()
    while device.enabled():
        device.advance(draw.choice(device.enabled()))
    assert len(ran) == uses(seed, 12)

"""Prompts that read more experts of a layer than DRAM has slots for them: the drive reads on while others are copied."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.common.measures import ALIGN
from penstock.planner.contract.bills.cost import predict
from penstock.planner.contract.bills.prefill import Moved
from penstock.planner.contract.decided.decisions import ExpertPolicyName, ExpertSlots
from penstock.planner.contract.experts.expert_cache import ExpertCache, Routing
from penstock.planner.contract.experts.expert_caches import expert_caches, keep_first
from penstock.planner.contract.experts.expert_slots import fewest_slots
from penstock.planner.contract.given.model import ModelSpec, Routers
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.price import Price, Resource
from penstock.planner.simulate.lanes.expert_lane import SimulatedExperts
from penstock.planner.simulate.lanes.lanes import Lanes
from penstock.runtime.experts.card_experts import CardExperts
from penstock.runtime.experts.host_experts import HostExperts
from penstock.runtime.experts.tiers.dram_experts import DramExperts, slot_bytes
from penstock.runtime.experts.tiers.expert_fetch import Key
from penstock.runtime.memory.arena import Arena
from penstock.runtime.memory.device import CopyDevice
from penstock.runtime.reading.layout import Extent, TensorLayout, UnitLayout
from penstock.runtime.reading.pending import Done
from penstock.runtime.reading.reads_inbox import Heard, Inbox, PlainInbox
from tests.planner.small import MB, machine, model, work
from tests.runtime.fakes import FakeDevice, _Record
from tests.runtime.moe.tiers import Clock, card_tier, each_of
from tests.support import HostCopier, decisions

COUNT, LAYERS = 24, 3
NBYTES = 3 * ALIGN
"""Of an expert, which comes in two parts."""
LAYOUTS = {
    (layer, expert): UnitLayout(
        NBYTES, (TensorLayout("t", (NBYTES,), torch.uint8, 0, NBYTES),), (Extent(Path("nowhere"), 0, NBYTES, 0),), NBYTES
    )
    for layer in range(LAYERS)
    for expert in range(COUNT)
}
MODEL = model(LAYERS, ffn=240 * MB, experts=COUNT)
assert MODEL.experts is not None
EXPERTS = MODEL.experts
PASSING = fewest_slots(EXPERTS)


class Drive:
    """Reads that end when they are told to, in the order in which they were asked for, or when the host waits for nothing else."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._open: list[Done] = []

    def read_each(self, parts: Sequence[Sequence[Extent]], view: memoryview, dones: Sequence[Done], name: str, urgent: bool) -> None:
        self.asked.append(name)
        self._open += dones

    def begun(self) -> None: ...

    def inbox(self) -> Inbox[Any]:
        return _Awaited(self.end)

    def end(self) -> None:
        ended, self._open = self._open, []
        for done in ended:
            done(None)


class _Awaited(PlainInbox[Any]):
    def __init__(self, end: Callable[[], None]):
        super().__init__()
        self._end = end

    def take(self, most_s: float, least: int = 1) -> list[Heard[Any]]:
        if most_s:
            self._end()
        return super().take(most_s, least)


@contextmanager
def dram_of(drive: Drive, cache: ExpertCache, slots: int) -> Iterator[DramExperts]:
    """Without bytes: nobody looks at them here."""
    arena = Arena(slots * slot_bytes(LAYOUTS))
    below = DramExperts(LAYOUTS, arena, 0, cache, drive, 2 * ALIGN, 2)  # type: ignore[arg-type]
    try:
        yield below
    finally:
        below.close()
        arena.close()


class Later:
    """An expert is worth its number: what comes is kept instead of the first ones."""

    needs_ahead = None

    def study(self, layer: int, routed: np.ndarray) -> None: ...

    def worth(self, layer: int) -> np.ndarray:
        return np.arange(COUNT, dtype=np.float32)


KEPT = 12
"""Experts of each layer that DRAM keeps: the first ones."""
NEAR, FAR = range(KEPT - 1, 2, -1), range(KEPT, KEPT + 8)
"""Those that a visit asks of them, the best first, and those that it reads. They are fewer than would have the next layer's come ahead."""


@contextmanager
def kept(drive: Drive, vram: ExpertCache | None) -> Iterator[DramExperts]:
    """DRAM before its first visit: it keeps the first ones of each layer."""
    slots = LAYERS * KEPT + PASSING
    cache = ExpertCache(dict.fromkeys(range(LAYERS), KEPT), slots, COUNT, Later(), vram)  # type: ignore[arg-type]
    for layer in range(LAYERS):
        for expert in range(KEPT):
            cache.keep(layer, expert)
    with dram_of(drive, cache, slots) as below:
        yield below


@contextmanager
def visited(device: CopyDevice, drive: Drive) -> Iterator[CardExperts]:
    """The same below a card that keeps none."""
    vram = ExpertCache(dict.fromkeys(range(LAYERS), 0), PASSING, COUNT, Later())  # type: ignore[arg-type]
    with kept(drive, vram) as below:
        yield card_tier(LAYOUTS, PASSING, below, vram, device)


def on_a_slow_link(drive: Drive) -> FakeDevice:
    """Copies and kernels are done while the host waits for one of them; the drive ends what it reads as often."""

    def goes_on(enabled: Sequence[str]) -> str:
        drive.end()
        return enabled[0]

    return FakeDevice(goes_on)


def test_all_that_a_prompt_reads_is_asked_for_before_the_last_of_drams_is_computed() -> None:
    """DRAM keeps what comes, so slots are left by those that it no longer keeps, once they were used."""
    drive = Drive()
    with visited(on_a_slow_link(drive), drive) as card:
        used, asked = [], []
        for expert, _ in each_of(card, 0, Routing(np.array([[*NEAR, *FAR]]), prompt=True)):
            used.append(expert)
            asked.append(len(drive.asked))
            drive.end()
    assert sorted(used) == sorted((*NEAR, *FAR)) and used[:PASSING] == [*NEAR][:PASSING]
    assert asked[0] == PASSING and asked[max(map(used.index, NEAR))] == len(FAR)
    assert drive.asked == [f"expert 0.{expert}" for expert in FAR]


def used_without_a_card(below: DramExperts, drive: Drive, chosen: Sequence[int]) -> tuple[list[int], list[int]]:
    """By a prompt of ``chosen``: experts in the order in which they are used, and how many reads had been asked when each came."""
    source = HostExperts(below, {key: layout.tensors for key, layout in LAYOUTS.items()}, Clock())
    used, asked = [], []
    for expert, _ in each_of(source, 0, Routing(np.array([[*chosen]]), prompt=True)):
        used.append(expert)
        asked.append(len(drive.asked))
        drive.end()
    return used, asked


def test_without_a_card_it_is_likewise() -> None:
    drive = Drive()
    with kept(drive, None) as below:
        used, asked = used_without_a_card(below, drive, (*NEAR, *FAR))
    assert sorted(used) == sorted((*NEAR, *FAR)) and asked[max(map(used.index, NEAR))] == len(FAR)


def test_without_a_card_what_goes_for_an_expert_that_came_is_computed_next() -> None:
    """That one is used, and has its slot until then: the drive would rest while all others that came are computed."""
    drive, near = Drive(), range(8)
    with kept(drive, None) as below:
        used, asked = used_without_a_card(below, drive, (*near, *FAR))
    came = KEPT
    assert used[:6] == [0, came, came + 1, 1, came + 2, 2], "the first one that came takes the slot of 0, which was used"
    assert asked[:6] == [PASSING, PASSING, *(PASSING + n for n in (1, 1, 2, 2))]
    assert sorted(used) == [*near, *FAR]


def test_while_the_drive_reads_no_more_copies_wait_than_slots_are_for() -> None:
    """What it brings would be copied behind all of them."""
    drive = Drive()
    device = on_a_slow_link(drive)
    with visited(device, drive) as card:
        waiting, used = [], set[int]()
        for expert, _ in each_of(card, 0, Routing(np.array([[*NEAR, *FAR]]), prompt=True)):
            used.add(expert)
            if len(drive.asked) < len(FAR) and not used.issuperset(NEAR):
                waiting.append(sum(isinstance(work, _Record) for work in device._queues["copies"]))
        assert len(waiting) > PASSING and max(waiting) == PASSING - 1


def test_where_nothing_is_read_the_host_waits_for_no_copy() -> None:
    drive = Drive()
    device = on_a_slow_link(drive)
    device.on_compute_path = True
    with visited(device, drive) as card:
        assert [expert for expert, _ in each_of(card, 0, Routing(np.array([NEAR]), prompt=True))] == [*NEAR]
    assert not drive.asked


def plan_of(slots: ExpertSlots, of: ModelSpec = MODEL) -> Plan:
    card = slots.vram_slots > 0
    made, hardware = decisions(experts=slots, gpu=card), machine() if card else machine(vram=0)
    return Plan(hardware, of, work(), made, predict(hardware, of, work(), made))


def routings(seed: int) -> Iterator[tuple[int, Routing]]:
    """Of several tokens, which ask for less than would have the next layer's come ahead."""
    draw = random.Random(seed)
    for k in range(4 * LAYERS):
        chosen = draw.sample(range(COUNT), 2 * draw.randint(1, 8))
        yield k % LAYERS, Routing(np.array(chosen).reshape(-1, 2), prompt=draw.random() < 0.7)


def simulated(plan: Plan, visits: Iterable[tuple[int, Routing]], read_s: float) -> list[Key]:
    """``read_s``: of an expert, from the SSD. Without a card it reads while each expert is computed."""
    lanes, moved = Lanes({}, {}), Moved.of(plan.hardware, plan.model, plan.decisions)
    acted = SimulatedExperts(plan, replace(moved, expert_read=Price({Resource.ssd: read_s}), read_late_s=0.0), lanes)
    order = list[Key]()
    for layer, routing in visits:
        acted.visit(layer, routing)
        while acted.waiting:
            while acted.go_on():
                pass
            expert = acted.ready()
            if expert is None:
                assert lanes.step(), "nothing moves"
                continue
            order.append((layer, expert))
            while acted.card is None and lanes.step():
                pass
            acted.used(expert)
    return order


def ran(slots: ExpertSlots, seed: int) -> list[Key]:
    vram, dram = expert_caches(EXPERTS, slots, gpu=slots.vram_slots > 0)
    keep_first(EXPERTS, vram, dram)
    drive, order = Drive(), list[Key]()
    with dram_of(drive, dram, slots.dram_slots) as below:
        source: CardExperts | HostExperts = HostExperts(below, {key: layout.tensors for key, layout in LAYOUTS.items()}, Clock())
        if vram is not None:
            source = card_tier(LAYOUTS, slots.vram_slots, below, vram, HostCopier())
        for layer, routing in routings(seed):
            for expert, _ in each_of(source, layer, routing):
                order.append((layer, expert))
                drive.end()
    return order


@settings(deadline=None, max_examples=60)
@given(
    vram=st.integers(PASSING, 30) | st.just(0), dram=st.integers(PASSING, 60), seed=st.integers(0, 10**6),
    policy=st.sampled_from([ExpertPolicyName.lru, ExpertPolicyName.mix]),
)  # fmt: skip
def test_a_simulation_computes_with_experts_in_the_order_of_a_run(vram: int, dram: int, seed: int, policy: ExpertPolicyName) -> None:
    slots = ExpertSlots(vram, dram, policy, chunk_bytes=MODEL.experts.expert_bytes // 2)
    at_once_s = 1e-8  # the drive has read all before a copy is over
    assert simulated(plan_of(slots), routings(seed), at_once_s) == ran(slots, seed)


MANY = 8
"""Experts of one token, and so slots for experts that pass through."""


@settings(deadline=None, max_examples=60)
@given(vram=st.integers(MANY, 12), dram=st.integers(MANY, 60), read_s=st.floats(1e-5, 1e-2), seed=st.integers(0, 10**6))
def test_a_simulated_prompt_ends_where_parts_of_several_experts_are_read_at_once(vram: int, dram: int, read_s: float, seed: int) -> None:
    """Each has a slot in VRAM, or waits for one. Experts of the next layer come ahead into others."""
    plan = plan_of(ExpertSlots(vram, dram, chunk_bytes=EXPERTS.expert_bytes // 3), replace(MODEL, routers=Routers(MANY, EXPERTS.hit_rates)))
    draw = np.random.default_rng(seed)
    reads = replace(plan.decisions.weights.ssd, block_bytes=EXPERTS.expert_bytes // 3, queue_depth=int(draw.integers(1, 9)))
    made = replace(plan.decisions, weights=replace(plan.decisions.weights, ssd=reads))
    visits = [(k % LAYERS, Routing(draw.permutation(COUNT).reshape(-1, MANY), prompt=True)) for k in range(3 * LAYERS)]
    order = simulated(replace(plan, decisions=made), visits, read_s)
    assert len({*order}) == EXPERTS.units and len(order) == 3 * EXPERTS.units

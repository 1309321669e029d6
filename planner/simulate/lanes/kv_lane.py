"""KV of layers that lie outside the device, as passes meet it: waited for, brought by a ring, or attended to by the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.planner.common.timeline.spans import D2H, KV, SSD, SSD_WRITE
from penstock.planner.contract.bills.prefill import Moved
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.kv_tiers import attended_on_host
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.policy.turns import Turns
from penstock.planner.contract.prices.beside import Beside
from penstock.planner.contract.prices.price import Resource
from penstock.planner.contract.prices.sizes import kv_ring_slots, kv_staging_slots
from penstock.planner.simulate.lanes.events import Record
from penstock.planner.simulate.lanes.kv_homes import DramKv, KvRates, SpilledKv, Tokens, outside_kv
from penstock.planner.simulate.lanes.lanes import Lanes, Work, ns
from penstock.planner.simulate.lanes.ring_lane import SimulatedRing

LANES = (KV, D2H, SSD_WRITE)
"""Tracks on which nothing but KV moves."""


class HostKv:
    """Without a GPU: compute waits for the layer itself."""

    waits_for = SSD

    def __init__(self, home: SpilledKv, layers: Sequence[int]):
        self._home = home
        self.layers = frozenset(layers)

    def begin_pass(self) -> None:
        """Layers are read ahead all the time."""

    def ask(self, layer: int) -> None:
        self._home.ask(layer)

    def ready(self, layer: int) -> bool:
        return self._home.there(layer)

    def enter(self, layer: int) -> None:
        self._home.take(layer)

    def leave(self, layer: int) -> None:
        self._home.give_back(layer)

    def go_on(self) -> bool:
        return False

    def state(self) -> tuple[object, ...]:
        return self._home.state()

    def rebase(self, passed_ns: int) -> None:
        """No time is kept."""


class CardKv:
    """``penstock.runtime.kv.outside.streamed_kv.RingKv``: layers pass through slots of VRAM, new rows go out behind their attention."""

    waits_for = KV

    def __init__(self, homes: Mapping[int, SpilledKv | DramKv], slots: int, rates: KvRates, tokens: Tokens, lanes: Lanes, record: Record):
        self.layers = frozenset(homes)
        self._homes, self._rates, self._tokens, self._lanes = homes, rates, tokens, lanes
        units = [Unit("kv", layer) for layer in sorted(homes)]
        turns = Turns([u.ring_class for u in units], {"kv": slots}, min(slots, len(units) - 1))
        self._ring = SimulatedRing(units, turns, self._size, _Source(homes), lanes, record, KV)

    def begin_pass(self) -> None:
        self._ring.begin_pass()

    def ask(self, layer: int) -> None:
        self._ring.turns.asked = self._ring.turns.entered + 1

    def ready(self, layer: int) -> bool:
        return self._ring.copied(self._ring.turns.entered)

    def enter(self, layer: int) -> None:
        self._ring.issue(self._ring.turns.entered + 1)

    def leave(self, layer: int) -> None:
        number = self._ring.turns.entered - 1
        _, new = self._tokens(number // len(self._homes))
        work = Work(("kv", layer), f"kv.{layer}", round(new * self._rates.nbytes), partial(self._stored, layer, number))
        self._lanes.add(D2H, work, ns(new * self._rates.d2h_s))

    def go_on(self) -> bool:
        return self._ring.go_on()

    def state(self) -> tuple[object, ...]:
        return self._ring.state(), tuple(home.state() for home in dict.fromkeys(self._homes.values()))

    def rebase(self, passed_ns: int) -> None:
        self._ring.rebase(passed_ns)

    def _stored(self, layer: int, number: int) -> None:
        self._ring.free(number)
        self._homes[layer].give_back(layer)

    def _size(self, number: int) -> tuple[int, int]:
        old, _ = self._tokens(number // len(self._homes))
        return ns(old * self._rates.h2d_s), round(old * self._rates.nbytes)


class _Source:
    """The homes as a ring asks them. A layer is given back when its new rows are on their way."""

    def __init__(self, homes: Mapping[int, SpilledKv | DramKv]):
        self._homes = homes

    def arrived(self, unit: Unit) -> bool:
        return self._homes[unit.layer].there(unit.layer)

    def ask(self, unit: Unit) -> None:
        self._homes[unit.layer].ask(unit.layer)

    def take(self, unit: Unit) -> None:
        self._homes[unit.layer].take(unit.layer)

    def give_back(self, unit: Unit) -> None:
        """Nothing."""


class AttendedKv:
    """In decode steps, layers of DRAM that the CPU attends to beside those that stream, if any do."""

    def __init__(self, attended: Sequence[int], streamed: CardKv | None, rates: AttentionRates, tokens: Tokens, lanes: Lanes):
        self.layers = frozenset(attended) | (streamed.layers if streamed else frozenset())
        self.attended, self.streamed = frozenset(attended), streamed
        self._rates, self._tokens, self._lanes = rates, tokens, lanes
        self._passes = -1

    @property
    def waits_for(self) -> str:
        return KV

    def begin_pass(self) -> None:
        self._passes += 1
        if self.streamed is not None:
            self.streamed.begin_pass()

    def work(self, layer: int) -> tuple[Work, int]:
        """Attention of ``layer`` in this pass, and its nanoseconds beside nothing else."""
        old, _ = self._tokens(self._passes)
        nbytes = round(old * self._rates.nbytes)
        return Work(("kv", layer), f"kv.{layer}", nbytes, lambda: None), ns(old * self._rates.token_s + self._rates.hop_s)

    def ask(self, layer: int) -> None:
        if self.streamed is not None and layer not in self.attended:
            self.streamed.ask(layer)

    def ready(self, layer: int) -> bool:
        return layer in self.attended or (self.streamed is not None and self.streamed.ready(layer))

    def enter(self, layer: int) -> None:
        if self.streamed is not None and layer not in self.attended:
            self.streamed.enter(layer)

    def leave(self, layer: int) -> None:
        if self.streamed is not None and layer not in self.attended:
            self.streamed.leave(layer)

    def go_on(self) -> bool:
        return self.streamed is not None and self.streamed.go_on()

    def state(self) -> tuple[object, ...]:
        return () if self.streamed is None else self.streamed.state()

    def rebase(self, passed_ns: int) -> None:
        if self.streamed is not None:
            self.streamed.rebase(passed_ns)


@dataclass(frozen=True)
class AttentionRates:
    """Of the CPU's attention: bytes and seconds for each token of one layer's KV of the whole batch, and seconds besides."""

    nbytes: float
    token_s: float
    hop_s: float

    @classmethod
    def of(cls, plan: Plan, rates: KvRates) -> AttentionRates:
        beside = Beside.of(plan.hardware, plan.model, plan.decisions.batch, plan.decisions.weights.forms).attends
        return cls(rates.nbytes, beside.attended(rates.nbytes).of(Resource.cpu), beside.hop.of(Resource.cpu))


def open_attended(plan: Plan, moved: Moved, batch: int, tokens: Tokens, lanes: Lanes, record: Record) -> AttendedKv | None:
    """The KV of a batch whose prompts were computed, for its decode steps; None where the CPU attends to none of it."""
    attended = attended_on_host(plan.model.layers, plan.decisions.kv) if plan.hardware.gpu else ()
    if not attended:
        return None
    streamed = open_kv(plan, moved, batch, tokens, lanes, record, frozenset(attended))
    assert not isinstance(streamed, HostKv)
    return AttendedKv(attended, streamed, AttentionRates.of(plan, KvRates.of(plan, moved, batch)), tokens, lanes)


def open_kv(
    plan: Plan, moved: Moved, batch: int, tokens: Tokens, lanes: Lanes, record: Record, but: frozenset[int] = frozenset()
) -> HostKv | CardKv | None:
    """The KV of a batch, layers ``but`` left out; None where all of it lies where it is computed with."""
    tiers = {layer: tier for layer, tier in outside_kv(plan).items() if layer not in but}
    if not tiers:
        return None
    rates = KvRates.of(plan, moved, batch)
    on_ssd = [i for i, tier in tiers.items() if tier is Tier.ssd]
    homes: dict[int, SpilledKv | DramKv] = {}
    in_dram = [i for i, tier in tiers.items() if tier is Tier.dram]
    if in_dram:
        homes |= dict.fromkeys(in_dram, DramKv())
    if on_ssd:
        spilled = SpilledKv(on_ssd, kv_staging_slots(plan.model, plan.decisions.kv), rates, tokens, lanes)
        homes |= dict.fromkeys(on_ssd, spilled)
        if plan.hardware.gpu is None:
            return HostKv(spilled, on_ssd)
    return CardKv(homes, min(len(tiers), kv_ring_slots(plan.model, plan.decisions.kv)), rates, tokens, lanes, record)

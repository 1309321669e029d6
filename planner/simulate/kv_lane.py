"""KV of layers that lie outside the device, without bytes: where it is between visits, and the ring that brings it to a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.planner.common.timeline.spans import D2H, KV, SSD, SSD_WRITE
from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.decided.kv_tiers import attended_on_host
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.policy.layer_slots import Held, LayerSlots
from penstock.planner.contract.policy.rolling import RollingPolicy
from penstock.planner.contract.policy.turns import Turns
from penstock.planner.contract.prices.beside import Beside
from penstock.planner.contract.prices.prefill import Moved
from penstock.planner.contract.prices.price import Resource
from penstock.planner.contract.prices.sizes import kv_ring_slots, kv_staging_slots
from penstock.planner.simulate.events import Record
from penstock.planner.simulate.lanes import Lanes, Work, ns
from penstock.planner.simulate.ring_lane import SimulatedRing
from penstock.planner.simulate.simulated_work import outside_kv

LANES = (KV, D2H, SSD_WRITE)
"""Tracks on which nothing but KV moves."""

Tokens = Callable[[int], tuple[float, float]]
"""Pass of the batch -> (tokens that are brought in, new ones that go out)."""


@dataclass(frozen=True)
class KvRates:
    """Seconds and bytes of one token of one layer's KV for the whole batch, each with its link to itself."""

    nbytes: float
    ssd_s: float
    write_s: float
    h2d_s: float
    d2h_s: float

    @classmethod
    def of(cls, plan: Plan, moved: Moved, batch: int) -> KvRates:
        tiers = list(outside_kv(plan).values())
        share = batch / plan.decisions.batch / plan.workload.max_tokens
        all_, on_ssd = share / max(1, len(tiers)), share / max(1, tiers.count(Tier.ssd))
        nbytes = max(moved.kv_h2d_bytes * all_, moved.kv_ssd_bytes * on_ssd)
        read, kv = moved.kv.read, moved.kv
        ssd_s, write_s = read.of(Resource.ssd) * on_ssd, kv.written.of(Resource.ssd) * on_ssd
        return cls(nbytes, ssd_s, write_s, read.of(Resource.h2d) * all_, kv.back.of(Resource.d2h) * all_)


class SpilledKv:
    """``penstock.runtime.kv.outside.spill``: ``layers`` on the SSD, read ahead into ``slots`` of DRAM, new rows written behind."""

    def __init__(self, layers: Sequence[int], slots: int, rates: KvRates, tokens: Tokens, lanes: Lanes):
        self._slots = LayerSlots(RollingPolicy(tuple(layers), max(1, slots - 1), slots, slots - 1), slots)
        self._rates, self._tokens, self._lanes = rates, tokens, lanes
        self._taken: set[int] = set()
        self._later: dict[int, Held] = {}
        self._visits: Counter[int] = Counter()
        self._asked: int | None = None
        self._start(self._slots.preload())

    def there(self, layer: int) -> bool:
        return layer not in self._taken and self._slots.is_ready(layer)

    def ask(self, layer: int) -> None:
        self._asked = layer
        self._access()

    def _access(self) -> None:
        """A layer is asked of the slots only when its rows of the pass before were written."""
        if self._asked is not None and self._asked not in self._taken:
            layer, self._asked = self._asked, None
            self._start(self._slots.access(layer))

    def take(self, layer: int) -> None:
        self._slots.take(layer)
        self._taken.add(layer)

    def give_back(self, layer: int) -> None:
        _, new = self._tokens(self._visits[layer])
        nbytes = round(new * self._rates.nbytes)
        self._lanes.add(SSD_WRITE, Work(("kv", layer), f"kv.{layer}", nbytes, partial(self._written, layer)), ns(new * self._rates.write_s))

    def state(self) -> tuple[object, ...]:
        return self._slots.state(), tuple(sorted(self._taken)), tuple(sorted(self._later)), self._asked

    def _written(self, layer: int) -> None:
        self._taken.remove(layer)
        self._visits[layer] += 1
        later = self._later.pop(layer, None)
        self._start(self._slots.leave(layer))
        if later is not None:
            self._start([later])
        self._access()

    def _start(self, started: list[Held]) -> None:
        todo = list(started)
        while todo:
            held = todo.pop(0)
            if held.layer in self._taken:
                self._later[held.layer] = held
                continue
            old, _ = self._tokens(self._visits[held.layer])
            if old:
                work = Work(("kv", held.layer), f"kv.{held.layer}", round(old * self._rates.nbytes), partial(self._read, held))
                self._lanes.add(SSD, work, ns(old * self._rates.ssd_s))
            else:
                todo += self._slots.arrived(held)

    def _read(self, held: Held) -> None:
        self._start(self._slots.arrived(held))


class DramKv:
    """``penstock.runtime.kv.outside.kv_home.DramHome``: each layer has its place, and is there once its new rows are."""

    def __init__(self) -> None:
        self._storing: set[int] = set()

    def there(self, layer: int) -> bool:
        return layer not in self._storing

    def ask(self, layer: int) -> None:
        """It is there, or on its way."""

    def take(self, layer: int) -> None:
        self._storing.add(layer)

    def give_back(self, layer: int) -> None:
        self._storing.discard(layer)

    def state(self) -> tuple[object, ...]:
        return tuple(sorted(self._storing))


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
        beside = Beside.of(plan.hardware, plan.model, plan.decisions.batch, plan.decisions.weights.forms)
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

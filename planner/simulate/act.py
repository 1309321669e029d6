"""The plan acted out: pass after pass, unit after unit, as long as nothing comes again exactly as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import GB
from penstock.planner.common.timeline.spans import COMPUTE, CPU, EXPERTS, H2D, KV, PASS, SSD
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.decided.recording import is_recorded
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.policy import make_policy
from penstock.planner.contract.policy.layer_slots import CacheStats
from penstock.planner.contract.policy.turns import Turns
from penstock.planner.contract.prices.beside import Beside
from penstock.planner.contract.prices.prefill import Moved
from penstock.planner.contract.prices.stages import h2d_gbps, ssd_gbps
from penstock.planner.simulate.bus_shares import beside_shares, bus_shares
from penstock.planner.simulate.dram_lane import SimulatedDram
from penstock.planner.simulate.events import Record
from penstock.planner.simulate.expert_lane import SimulatedExperts, TierCounts
from penstock.planner.simulate.feed import CardFeed, HostFeed, RecordedFeed, ResidentFeed
from penstock.planner.simulate.kv_lane import LANES, AttendedKv, CardKv, HostKv, open_attended, open_kv
from penstock.planner.simulate.lanes import NS, Clock, Lanes, Work, ns
from penstock.planner.simulate.ring_lane import SimulatedRing
from penstock.planner.simulate.routers import DrawnRouters, Routers
from penstock.planner.simulate.simulated_work import Pass, Passes, drafted_rows, passes_of
from penstock.planner.simulate.sums import Stand, Sums, acted_out

AHEAD_PASSES = 2
"""Passes at the end of a run of equal ones that are acted out if KV streams. KV then moves for the passes that follow, which have more of
it."""

Progress = Callable[[int, int], None]
"""Called with (decode steps done, all)."""


@dataclass(frozen=True)
class Options:
    """How a plan is acted out, beside what it decides."""

    wrap_around: bool = True
    keep_spans: bool = False
    keep_log: bool = False
    skip: bool = True
    """Whether passes that would be the same as earlier ones are counted instead of acted out."""


@dataclass(frozen=True)
class Acted:
    """What came of it. ``record`` has the times; ``cache`` is what a run calls the same."""

    plan: Plan
    record: Record
    cache: CacheStats
    total_ns: int
    acted_passes: int
    """Of all passes, those that were acted out one by one."""
    experts: dict[str, TierCounts]
    """Tier -> what was found in it; empty for a dense model."""
    computed_on_cpu: int = 0
    """Experts that the CPU computed beside the card."""


@dataclass(frozen=True)
class Among:
    """A rank among others."""

    clock: Clock
    """Of all of them."""
    host: int
    machine: HardwareProfile
    """Its drive, its link and the bus, as fast as they are while no other rank uses them."""


class Wait(NamedTuple):
    """What a pass waits for."""

    ready: Callable[[], bool]
    what: object

    def stuck(self) -> UserError:
        """Nothing can bring it about."""
        return UserError(f"the plan is stuck before {self.what}: nothing moves and nothing computes; give it more slots or layers")


Totals = Mapping[str, tuple[int, int]]
"""Track -> nanoseconds that it was busy, and bytes that it brought."""


class Sharing(Protocol):
    """Ranks that compute with slices of a layer's experts while the layer's own rank does."""

    def tell(self, layer: int, each: Pass) -> None:
        """Its router has chosen."""

    def gather(self, layer: int) -> Iterator[Wait]:
        """Until what all others made has come."""


class Simulation:
    """One plan, from the moment at which it has loaded, all batches of its workload one after the other.

    Time is in whole nanoseconds and returns to 0 after each pass. If the state at a pass's end equals an earlier one, and coming passes are
    as long, everything repeats. As many whole periods as fit are then added up.
    """

    def __init__(
        self,
        plan: Plan,
        options: Options = Options(),
        progress: Progress = lambda done, of: None,
        routers: Routers | None = None,
        among: Among | None = None,
    ):
        self._plan, self._options, self._progress = plan, options, progress
        self._machine = plan.hardware if among is None else among.machine
        self._placement = plan.placement
        self.units = tuple(unit for unit, _ in self._placement.units)
        self._moved = Moved.of(self._machine, plan.model, plan.decisions)
        self.record = Record(options.keep_spans)
        booked = self.record.booked if options.keep_spans else None
        seat = (among.clock, among.host, self._machine.gpu.h2d.peak if self._machine.gpu else 0.0) if among else ()
        self.lanes = Lanes(bus_shares(self._machine, plan.decisions), beside_shares(self._machine), booked, *seat)
        self._dram = self._make_dram()
        self._ring_feed = self._make_feed()
        self._host_ns = self._of_host()
        self._recorded_feed = self._make_recorded()
        self._feed: HostFeed | CardFeed | ResidentFeed | RecordedFeed = self._ring_feed
        self._experts = SimulatedExperts(plan, self._moved, self.lanes) if plan.model.experts else None
        self._routers = routers or (DrawnRouters(plan.model.experts) if plan.model.experts else None)
        self._places = {layer: i for i, layer in enumerate(plan.model.experts.layers)} if plan.model.experts else {}
        self.sharing: Sharing | None = None
        """The other ranks, where each of them has a slice of every expert."""
        self._sequences = 0
        self._kv: HostKv | CardKv | AttendedKv | None = None
        self._kv_layers: frozenset[int] = frozenset()
        self._runs: list[Passes] = []
        self._issued_ns = 0
        """Of the coming compute, what the host issued while it waited for experts."""
        self._at = 0
        """Passes of the batch that are over, those that were not acted out included."""
        self._not_acted = 0
        self._acted = 0
        self.idle_ns = 0
        """Behind the pass that is over: nothing goes on."""

    def run(self) -> Acted:
        """Act it out. UserError where nothing can go on."""
        work, batch = self._plan.workload, self._plan.decisions.batch
        waves, rest = divmod(max(work.requests, batch), batch)
        self._steps = (waves + bool(rest)) * (work.new_tokens - 1)
        self.fill()
        while self.lanes.step():
            self.settle()
        self.rebased(self.lanes.rebase())
        self.record.begin()
        self._repeat(waves, 0, lambda: self._batch(batch))
        if rest:
            self._batch(rest)
        return self.outcome()

    def fill(self) -> None:
        """All slots, before anything is timed."""
        self._dram.preload()
        self.settle()

    def outcome(self) -> Acted:
        """When all is over."""
        self._dram.slots.stats.wait_s = self.record.counts.pop("cache waits, ns", 0) / NS
        on_cpu = 0 if self._experts is None else self._experts.computed_on_cpu
        return Acted(self._plan, self.record, self._dram.slots.stats, self.record.offset_ns, self._acted, self._found(), on_cpu)

    def _found(self) -> dict[str, TierCounts]:
        tiers = {} if self._experts is None else {"vram": self._experts.card, "dram": self._experts.dram}
        return {name: tier.counts for name, tier in tiers.items() if tier is not None}

    def _make_dram(self) -> SimulatedDram:
        plan, placement = self._plan, self._placement
        ssd = plan.decisions.weights.ssd
        rate = ssd_gbps(self._machine, ssd.block_bytes, ssd.queue_depth) * GB
        nbytes = {i: placement.layer_dram_bytes(i) for i in placement.dram_layers}
        read_ns = {i: ns(n / rate) for i, n in nbytes.items()}
        policy = make_policy(placement, self._options.wrap_around)
        return SimulatedDram(placement, policy, read_ns, nbytes, self.lanes, self.record, self._options.keep_log)

    def _make_feed(self) -> HostFeed | CardFeed | ResidentFeed:
        gpu, placement, weights = self._machine.gpu, self._placement, self._plan.decisions.weights
        if gpu is None:
            return HostFeed(self._dram)
        units = placement.streamed_units
        if not units:
            return ResidentFeed()
        counts = {name: count for name, (count, _) in placement.ring_classes.items()}
        turns = Turns([u.ring_class for u in units], counts, weights.vram.prefetch_distance, self._options.wrap_around)
        sizes = [placement.unit_bytes(u) for u in units]
        copies = [(ns(n / h2d_gbps(gpu, n, weights.h2d.chunk_bytes) / GB), n) for n in sizes]
        ring = SimulatedRing(units, turns, lambda n: copies[n % len(copies)], self._dram, self.lanes, self.record, H2D)
        return CardFeed(ring, reads_back=self._plan.model.experts is not None)

    def _of_host(self) -> dict[Unit, int]:
        """Nanoseconds of each unit that the CPU computes in a decode step, its way there and back with it."""
        plan, decisions = self._plan, self._plan.decisions
        rows = decisions.batch * drafted_rows(plan)
        if not decisions.weights.host.compute(rows):
            return {}
        beside = Beside.of(plan.hardware, plan.model, rows, decisions.weights.forms)
        return {unit: ns(beside.handed_s(self._placement.spec(unit))) for unit in self._placement.host_units}

    @property
    def on_host(self) -> frozenset[Unit]:
        """Units that the CPU computes in a decode step."""
        return frozenset(self._host_ns)

    def _make_recorded(self) -> RecordedFeed | None:
        """Of decode steps that are recorded, or of which the CPU computes units, and that copy anything."""
        plan, placement, gpu = self._plan, self._placement, self._machine.gpu
        units = placement.step_units if self._host_ns else placement.streamed_units
        of_their_own = bool(self._host_ns) or is_recorded(plan.hardware, placement, plan.decisions.kv)
        if gpu is None or not units or not of_their_own:
            return None
        chunk_bytes = plan.decisions.weights.h2d.chunk_bytes
        counts = {name: count for name, (count, _) in placement.ring_classes.items()}

        def size(unit: Unit) -> tuple[int, int]:
            nbytes = placement.unit_bytes(unit)
            return ns(nbytes / h2d_gbps(gpu, nbytes, chunk_bytes) / GB), nbytes

        return RecordedFeed(units, counts, size, self.lanes)

    def begin_batch(self, batch: int, runs: list[Passes]) -> None:
        """``runs`` of as many sequences come next."""
        self.lanes.clear(*LANES)
        self._at, self._not_acted, self._sequences, self._runs = 0, 0, batch, runs
        self._kv = open_kv(self._plan, self._moved, batch, self._tokens, self.lanes, self.record)
        self._kv_layers = frozenset(self._kv.layers) if self._kv else frozenset()

    def _batch(self, batch: int) -> None:
        self.begin_batch(batch, passes_of(self._plan, self.units, batch))
        began = self.record.offset_ns
        for run in self._runs:
            if run.each.prefill:
                self._pass(run.each)
                if self._at == sum(r.count for r in self._runs if r.each.prefill):
                    self.record.prefill_ns.append(self.record.offset_ns - began)
                    self._mark("prefill", began)
            else:
                self._attend()
                self._repeat(run.count, AHEAD_PASSES if self._kv else 0, partial(self._step, run.each))

    def _attend(self) -> None:
        """From now on the CPU attends to its layers, which prompts have streamed: what still moves ends first, as in a run."""
        if isinstance(self._kv, AttendedKv) or not self._plan.decisions.kv.host_layers or drafted_rows(self._plan) > 1:
            return
        lanes, acted = self.lanes, self._at - self._not_acted
        began = self.record.offset_ns
        for track in LANES:
            lanes.of[track].queue.clear()
        self._kv = None
        self._await(Wait(lambda: not any(lanes.of[track].moving for track in LANES), "the first decode step"))
        self.rebased(self.lanes.rebase())
        self._kv = open_attended(self._plan, self._moved, self._sequences, lambda n: self._tokens(n + acted), lanes, self.record)
        self._mark("KV of prompts", began)

    def _step(self, each: Pass) -> None:
        began = self.record.offset_ns
        self._pass(each)
        self.record.step_ns.append(self.record.offset_ns - began)
        self._mark(f"decode {self._at - sum(r.count for r in self._runs if r.each.prefill)}", began)
        self._progress(len(self.record.step_ns), self._steps)

    def _mark(self, name: str, began: int) -> None:
        self.record.passed(PASS, name, began - self.record.offset_ns, 0)

    def _pass(self, each: Pass) -> None:
        """Every unit once."""
        for wait in self.passing(each):
            self._await(wait)
        self.rebased(self.lanes.rebase())

    def passing(self, each: Pass) -> Iterator[Wait]:
        """Every unit once, in steps between which something is waited for; over when the last unit was computed. What no stage explains
        comes behind it: in that time nothing goes on."""
        before = self.begin_pass(each)
        if each.before_ns:
            yield self.compute(Work(("embedding",), "embedding", 0, lambda: None), each.before_ns)
        for unit, length_ns in zip(self.units, each.unit_ns, strict=True):
            yield from self.visit(each, unit, length_ns)
        self.end_pass(each, before)

    def begin_pass(self, each: Pass) -> Totals:
        """What the lanes have done so far."""
        before = {track: (lane.busy_ns, lane.nbytes) for track, lane in self.lanes.of.items()}
        self._feed = (None if each.prefill else self._recorded_feed) or self._ring_feed
        self._feed.begin_pass()
        if self._kv is not None:
            self._kv.begin_pass()
        self.settle()
        return before

    def end_pass(self, each: Pass, before: Totals) -> None:
        """Its units are computed. ``before``: of :meth:`begin_pass`."""
        phase = "prefill" if each.prefill else "decode"
        for track, (busy_ns, nbytes) in before.items():
            lane = self.lanes.of[track]
            self.record.counts[f"{phase} {track} ns"] += lane.busy_ns - busy_ns
            self.record.counts[f"{phase} {track} bytes"] += lane.nbytes - nbytes
        self._at += 1
        self._acted += 1
        self.idle_ns = each.idle_ns + ns(self._plan.hardware.pass_s)

    def visit(self, each: Pass, unit: Unit, length_ns: int, first: bool = True, last: bool = True) -> Iterator[Wait]:
        """Compute ``unit``, or one of its parts: it is entered with the ``first`` one, and left with the ``last``."""
        lanes = self.lanes
        if first:
            since = max(0, lanes.now)
            self._feed.ask(unit)
            yield Wait(lambda: self._feed.ready(unit), unit)
            self._feed.enter(unit)
            self.record.waited(COMPUTE, self._feed.waits_for, str(unit), since, lanes.now)
        kv = self._kv if unit.kind == "attn" and unit.layer in self._kv_layers else None
        if kv is not None:
            since = lanes.now
            kv.ask(unit.layer)
            yield Wait(partial(kv.ready, unit.layer), unit)
            kv.enter(unit.layer)
            self.record.waited(COMPUTE, kv.waits_for, f"kv.{unit.layer}", since, lanes.now)
        if not each.prefill and unit in self._host_ns:
            work = Work((unit.kind, unit.layer), str(unit), self._placement.unit_bytes(unit), lambda: None)
            yield from self._compute_beside(unit, work, self._host_ns[unit])
        else:
            yield self.compute(Work((unit.kind, unit.layer), str(unit), 0, lambda: None), self._left_to_compute(length_ns))
        if isinstance(kv, AttendedKv) and unit.layer in kv.attended:
            yield from self._compute_beside(unit, *kv.work(unit.layer))
        number = self._plan.model.number_of(unit.layer)
        if unit.kind == "ffn" and number in self._places:
            if self.sharing is not None:
                self.sharing.tell(number, each)
            yield from self.route(each, number)
            if self.sharing is not None:
                yield from self.sharing.gather(number)
        if last:
            self._feed.leave(unit)
        if kv is not None:
            kv.leave(unit.layer)
        self.settle()

    def compute(self, work: Work, length_ns: int) -> Wait:
        """Until it is done."""
        lane = self.lanes.of[COMPUTE]
        self.lanes.add(COMPUTE, work, length_ns)
        return Wait(lambda: not lane.moving, work.name)

    def _compute_beside(self, unit: Unit, work: Work, length_ns: int) -> Iterator[Wait]:
        """The CPU does ``work`` of ``unit``, and the card waits for it."""
        since, lane = self.lanes.now, self.lanes.of[CPU]
        self.lanes.add(CPU, work, length_ns)
        yield Wait(lambda: not lane.moving, unit)
        self.record.waited(COMPUTE, CPU, work.name, since, self.lanes.now)

    def route(self, each: Pass, layer: int) -> Iterator[Wait]:
        """The layer's routed experts, each as soon as it is there."""
        experts, routers, lanes = self._experts, self._routers, self.lanes
        assert experts is not None and routers is not None, "only a model with routed experts has such layers"
        waits_for = EXPERTS if experts.card else SSD
        tokens = max(1, round(each.kv_new))
        routing = routers.next(self._places[layer], self._sequences, tokens, each.prefill)
        rows = Counter(routing.chosen.ravel().tolist())
        experts.visit(layer, routing)
        self._issued_ns, called_ns, begun = 0, each.called_ns * experts.copied, lanes.now
        while experts.waiting:
            since = lanes.now
            yield Wait(lambda: experts.copied_only() or experts.ready() is not None, f"experts of layer {layer}")
            copied_since = lanes.now
            yield Wait(lambda: experts.ready() is not None, f"experts of layer {layer}")
            self._issued_ns = min(each.issued_ns, self._issued_ns + lanes.now - copied_since)
            expert = experts.ready()
            assert expert is not None, "it was waited for"
            name, length_ns = f"expert.{layer}.{expert}", each.expert_ns + round(each.row_ns * rows[expert]) + called_ns
            on_cpu = experts.is_computed(expert)
            self.record.waited(COMPUTE, CPU if on_cpu else waits_for, name, since, lanes.now)
            if on_cpu:
                experts.used(expert)
                continue
            called_ns = 0
            yield self.compute(Work(("expert", layer), name, 0, lambda: None), self._left_to_compute(length_ns))
            experts.used(expert)
        if experts.shared and lanes.now < begun + each.shared_ns:
            yield self.compute(Work(("expert", layer), f"launches.{layer}", 0, lambda: None), begun + each.shared_ns - lanes.now)

    def _left_to_compute(self, length_ns: int) -> int:
        """Of a piece of compute what the host did not issue while it waited for experts."""
        issued = min(length_ns, self._issued_ns)
        self._issued_ns -= issued
        return length_ns - issued

    def _await(self, wait: Wait) -> None:
        while True:
            self.settle()
            if wait.ready():
                return
            if not self.lanes.step():
                raise wait.stuck()

    def settle(self) -> None:
        """Everything that can begin begins."""
        while any([part.go_on() for part in (self._ring_feed, self._kv, self._experts) if part is not None]):
            pass

    def rebased(self, passed: int) -> None:
        """The clock was set back by ``passed``, at a pass's end."""
        self.record.offset_ns += passed + self.idle_ns
        self.idle_ns = 0
        for part in (self._dram, self._ring_feed, self._recorded_feed, self._kv):
            if part is not None:
                part.rebase(passed)

    def _tokens(self, acted: int) -> tuple[float, float]:
        """Of a batch's pass, by its number among those that were acted out."""
        at = acted + self._not_acted
        for run in self._runs:
            if at < run.count:
                return run.each.kv_read, run.each.kv_new
            at -= run.count
        return 0.0, 0.0

    def _repeat(self, count: int, ahead: int, act: Callable[[], None]) -> None:
        acted_out(count, ahead, act, self.stand)

    def stand(self) -> Stand | None:
        """Where it stands between passes; None where passes are not to be skipped, or what they leave behind is still kept."""
        if not self._options.skip or self._experts is not None or not self.record.full:
            return None
        return Stand(self._state(), self._at, Sums.of(self.record, self._dram.slots.stats), self._skip)

    def _skip(self, sums: Sums, passes: int, times: int) -> None:
        sums.repeat(times, self.record, self._dram.slots.stats)
        self._at, self._not_acted = self._at + passes * times, self._not_acted + passes * times

    def _state(self) -> tuple[object, ...]:
        lanes = self.lanes
        idle = tuple(lanes.of[t].idle_since for t in (H2D, KV) if lanes.of[t].nbytes and not lanes.of[t].moving)
        recorded = None if self._recorded_feed is None else self._recorded_feed.state()
        return lanes.state(), idle, self._dram.state(), self._ring_feed.state(), recorded, None if self._kv is None else self._kv.state()

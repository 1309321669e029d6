"""The engine without bytes: units are visited pass after pass, each as soon as it is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from penstock.planner.common.timeline.spans import COMPUTE, CPU, H2D, KV
from penstock.planner.contract.bills.prefill import Moved
from penstock.planner.contract.decided.placement import Unit
from penstock.planner.contract.decided.recording import reads_layers
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.policy.walk import Walk
from penstock.planner.contract.prices.launches import is_recorded
from penstock.planner.simulate.acted import Acted, Options
from penstock.planner.simulate.batch_passes import BatchPasses
from penstock.planner.simulate.lanes.bus_shares import beside_shares, bus_shares
from penstock.planner.simulate.lanes.dram_lane import open_dram
from penstock.planner.simulate.lanes.events import Record
from penstock.planner.simulate.lanes.feed import Feed, Feeds
from penstock.planner.simulate.lanes.host_lane import HostLane
from penstock.planner.simulate.lanes.kv_lane import LANES, AttendedKv, CardKv, HostKv, open_attended, open_kv
from penstock.planner.simulate.lanes.lanes import NS, Clock, Lanes, Work, ns
from penstock.planner.simulate.lanes.wait import Wait
from penstock.planner.simulate.routed_layers import RoutedLayers
from penstock.planner.simulate.routers import Routers, drawn_routers
from penstock.planner.simulate.simulated_work import Pass, Passes, drafted_rows, host_units
from penstock.planner.simulate.sums import Stand, Sums

Totals = Mapping[str, tuple[int, int]]
"""Track -> nanoseconds that it was busy, and bytes that it brought."""


@dataclass(frozen=True)
class Among:
    """A rank among others."""

    clock: Clock
    """Of all of them."""
    host: int
    machine: HardwareProfile
    """Its drive, its link and the bus, as fast as they are while no other rank uses them."""


class SimulatedEngine:
    """What ``plan`` has one process do. Time is in whole nanoseconds. Who drives it sets the clock back after each pass."""

    def __init__(self, plan: Plan, options: Options, routers: Routers | None = None, among: Among | None = None):
        self._plan, self._options, self._placement = plan, options, plan.placement
        machine = plan.hardware if among is None else among.machine
        gpu, experts, placement = machine.gpu, plan.model.experts, self._placement
        self.units = tuple(unit for unit, _ in placement.units)
        self._moved = Moved.of(machine, plan.model, plan.decisions)
        self.record = Record(options.keep_spans)
        booked = self.record.booked if options.keep_spans else None
        seat = (among.clock, among.host, gpu.h2d.peak if gpu else 0.0) if among else ()
        self.lanes = Lanes(bus_shares(machine, plan.model, plan.decisions), beside_shares(machine, plan.decisions), booked, *seat)
        self._dram = open_dram(placement, machine, options.wrap_around, self.lanes, self.record, options.keep_log)
        on_host = host_units(plan)
        self.on_host = frozenset(on_host)
        """Units that the CPU computes in a decode step."""
        self._host = HostLane(on_host, self.lanes)
        self._walk = Walk.of(placement) if on_host and reads_layers(placement) else None
        feeds = Feeds(placement, gpu, options.wrap_around, self._dram, self.lanes, self.record, self._walk)
        self._launched_feed = feeds.launched(experts is not None)
        self._head_on_host = tuple(unit for unit in on_host if unit.kind == "head")
        of_their_own = bool(on_host) or is_recorded(plan.hardware, placement, plan.decisions.kv)
        self._step_feed = feeds.steps(bool(on_host)) if of_their_own else None
        self._feed: Feed = self._launched_feed
        self.routed: RoutedLayers | None = None
        if experts is not None:
            self.routed = RoutedLayers(plan, self._moved, self.lanes, self.record, routers or drawn_routers(plan))
        self.passes = BatchPasses()
        self._sequences = 0
        self._kv: HostKv | CardKv | AttendedKv | None = None
        self._kv_layers: frozenset[int] = frozenset()
        self._acted = 0
        self._ahead_ns = 0
        """For so long the interpreter could launch ahead while the CPU attended."""
        self.least_ns = 0
        """Of the pass that is over: until then nothing goes on behind it."""
        self.idle_ns = 0
        """Behind that in any case."""

    def fill(self) -> None:
        """All slots, before anything is timed."""
        self._dram.preload()
        self.settle()

    def outcome(self) -> Acted:
        """When all is over."""
        cache, experts = self._dram.slots.stats, None if self.routed is None else self.routed.experts
        cache.wait_s = self.record.counts.pop("cache waits, ns", 0) / NS
        found, on_cpu = ({}, 0) if experts is None else (experts.counts, experts.computed_on_cpu)
        return Acted(self._plan, self.record, cache, self.record.offset_ns, self._acted, found, on_cpu)

    @property
    def streams_kv(self) -> bool:
        """Whether layers of KV lie outside the device."""
        return self._kv is not None

    def begin_batch(self, batch: int, runs: Sequence[Passes]) -> None:
        """``runs`` of as many sequences come next."""
        self.lanes.clear(*LANES)
        self.passes.begin(runs)
        self._sequences = batch
        if self.routed is not None:
            self.routed.sequences = batch
        self._kv = open_kv(self._plan, self._moved, batch, self.passes.tokens, self.lanes, self.record)
        self._kv_layers = frozenset(self._kv.layers) if self._kv else frozenset()

    def attend(self) -> Iterator[Wait]:
        """From now on the CPU attends to its layers, which prompts have streamed: what still moves ends first, as in a run."""
        if isinstance(self._kv, AttendedKv) or not self._plan.decisions.kv.host_layers or drafted_rows(self._plan) > 1:
            return
        lanes, acted = self.lanes, self.passes.acted
        began = self.record.offset_ns
        for track in LANES:
            lanes.of[track].queue.clear()
        self._kv = None
        yield Wait(lambda: not any(lanes.of[track].moving for track in LANES), "the first decode step")
        self.rebased(lanes.rebase())
        self._kv = open_attended(self._plan, self._moved, self._sequences, lambda n: self.passes.tokens(n + acted), lanes, self.record)
        self.record.passed("KV of prompts", began)

    def begin_pass(self, each: Pass) -> Totals:
        """What the lanes have done so far."""
        self._ahead_ns = 0
        before = {track: (lane.busy_ns, lane.nbytes) for track, lane in self.lanes.of.items()}
        self._feed = (None if each.prefill else self._step_feed) or self._launched_feed
        if self._walk is not None:
            self._walk.begin_pass()
        self._feed.begin_pass()
        if self._kv is not None:
            self._kv.begin_pass()
        if not each.prefill:
            self._host.begin_step()
        self.settle()
        return before

    def end_pass(self, each: Pass, before: Totals) -> None:
        """Its units are computed. ``before``: of :meth:`begin_pass`. What no stage explains comes behind it."""
        phase = "prefill" if each.prefill else "decode"
        for track, (busy_ns, nbytes) in before.items():
            lane = self.lanes.of[track]
            self.record.counts[f"{phase} {track} ns"] += lane.busy_ns - busy_ns
            self.record.counts[f"{phase} {track} bytes"] += lane.nbytes - nbytes
        self.passes.over += 1
        self._acted += 1
        self.least_ns, self.idle_ns = each.least_ns, ns(self._plan.hardware.pass_s)

    def embed(self, before_ns: int) -> Iterator[Wait]:
        """Compute before the first unit, where there is some."""
        if before_ns:
            yield self.lanes.do(COMPUTE, Work(("embedding",), "embedding", 0, lambda: None), before_ns)

    def visit(self, each: Pass, at: int, first: bool = True, last: bool = True) -> Iterator[Wait]:
        """Compute unit number ``at``, or one of its parts: it is entered with the ``first`` one, and left with the ``last``."""
        lanes, unit = self.lanes, self.units[at]
        if unit == Unit("head", 0) and not each.prefill:
            self._ask_head()
        if first:
            since = max(0, lanes.now)
            self._feed.ask(unit)
            yield Wait(lambda: self._feed.ready(unit), unit)
            self._feed.enter(unit)
            self.record.waited(COMPUTE, self._feed.waits_for, str(unit), since, lanes.now)
        kv = self._kv if unit.kind == "attn" and unit.layer in self._kv_layers else None
        if kv is not None and first:
            since = lanes.now
            kv.ask(unit.layer)
            yield Wait(partial(kv.ready, unit.layer), unit)
            kv.enter(unit.layer)
            self.record.waited(COMPUTE, kv.waits_for, f"kv.{unit.layer}", since, lanes.now)
        if not each.prefill and unit in self._head_on_host:
            yield from self._wait_beside(self._host.answer(unit), str(unit))
        elif not each.prefill and unit in self._host:
            yield from self._wait_beside(self._host.ask(unit, self._placement.unit_bytes(unit)), str(unit))
        else:
            length_ns = each.unit_ns[at]
            if self.routed is not None:
                length_ns -= self.routed.hidden(each.unit_issued_ns[at])
            length_ns -= self._launched_before(each.unit_issued_ns[at])
            yield lanes.do(COMPUTE, Work((unit.kind, unit.layer), str(unit), 0, lambda: None), length_ns)
        if isinstance(kv, AttendedKv) and unit.layer in kv.attended:
            (work, length_ns), since = kv.work(unit.layer), lanes.now
            yield from self._wait_beside(lanes.do(CPU, work, length_ns), work.name)
            self._ahead_ns += lanes.now - since
        if unit.kind == "ffn" and self.routed is not None:
            yield from self.routed.visit(each, self._plan.model.number_of(unit.layer))
        if last:
            self._feed.leave(unit)
        if kv is not None and last:
            kv.leave(unit.layer)
        self.settle()

    def _launched_before(self, issued_ns: int) -> int:
        """Of what launching a unit takes, what was launched meanwhile."""
        hidden_ns = min(self._ahead_ns, issued_ns)
        self._ahead_ns -= hidden_ns
        return hidden_ns

    def _ask_head(self) -> None:
        """The CPU begins with its blocks of the LM head, while the card computes its own."""
        for unit in self._head_on_host:
            self._host.ask(unit, self._placement.unit_bytes(unit))

    def _wait_beside(self, answer: Wait, name: str) -> Iterator[Wait]:
        """The card waits for what the CPU does."""
        since = self.lanes.now
        yield answer
        self.record.waited(COMPUTE, CPU, name, since, self.lanes.now)

    def settle(self) -> None:
        """Everything that can begin begins."""
        experts = None if self.routed is None else self.routed.experts
        while any([part.go_on() for part in (self._launched_feed, self._step_feed, self._kv, experts) if part is not None]):
            pass

    def rebased(self, passed: int) -> None:
        """The clock was set back by ``passed``, at a pass's end."""
        self.record.offset_ns += max(passed, self.least_ns) + self.idle_ns
        self.least_ns = self.idle_ns = 0
        for part in (self._dram, self._launched_feed, self._step_feed, self._kv):
            if part is not None:
                part.rebase(passed)

    def stand(self) -> Stand | None:
        """Where it stands between passes; None where passes are not to be skipped, or what they leave behind is still kept."""
        if not self._options.skip or self.routed is not None or not self.record.full:
            return None
        return Stand(self._state(), self.passes.over, Sums.of(self.record, self._dram.slots.stats), self._skip)

    def _skip(self, sums: Sums, passes: int, times: int) -> None:
        sums.repeat(times, self.record, self._dram.slots.stats)
        self.passes.skip(passes * times)

    def _state(self) -> tuple[object, ...]:
        lanes = self.lanes
        idle = tuple(lanes.of[t].idle_since for t in (H2D, KV) if lanes.of[t].nbytes and not lanes.of[t].moving)
        recorded = None if self._step_feed is None else self._step_feed.state()
        return (
            lanes.state(),
            idle,
            self._dram.state(),
            self._launched_feed.state(),
            recorded,
            None if self._kv is None else self._kv.state(),
        )

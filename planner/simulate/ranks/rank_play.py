"""One rank of a plan that is acted out: its layers, part by part, each when it has come from the rank before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from penstock.planner.common.timeline.spans import COMPUTE, HOP, LAUNCH
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.links import Links
from penstock.planner.contract.given.network import Network
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.launches import begun_issue_s, is_recorded, part_operations
from penstock.planner.contract.ranks.rank_chain import recorded_hop_s, told_bytes
from penstock.planner.contract.ranks.rank_parts import parts_of
from penstock.planner.simulate.acted import Options
from penstock.planner.simulate.lanes.lanes import Clock, Work, ns
from penstock.planner.simulate.lanes.wait import Wait
from penstock.planner.simulate.routers import drawn_routers
from penstock.planner.simulate.simulated_engine import Among, SimulatedEngine
from penstock.planner.simulate.simulated_work import Pass, Passes, passes_of

LAST, LOGITS = "last", "logits"
"""Hidden states behind all layers, and a rank's rows of logits."""
TOLD, MADE = "told", "made"
"""Hidden states whose experts are sliced, and what another rank made of them."""


@dataclass(frozen=True)
class PartedPass:
    """One pass, whose parts go through each layer one behind the other."""

    parts: tuple[Pass, ...]

    @property
    def whole(self) -> Pass:
        """The first part, with the KV that goes out of all."""
        return replace(self.parts[0], kv_new=sum(part.kv_new for part in self.parts))


class RankPlay:
    """Rank ``number`` of ``plan``, on ``clock``. It shares bus, drive and links with those of its host. ``here`` is what has come to any
    rank in the pass in progress."""

    def __init__(self, plan: Plan, number: int, clock: Clock, options: Options, here: set[tuple[object, int]]):
        self.plan, self.number = plan.of_rank(number), number
        self._whole, self._here = plan, here
        self._dealing = plan.dealing
        ranks_a_host = plan.ranks.count // plan.hardware.hosts
        among = Among(clock, number // ranks_a_host, _unshared(self.plan.hardware, plan.hardware, number % ranks_a_host))
        self._steps_recorded = is_recorded(self.plan.hardware, self.plan.placement, self.plan.decisions.kv)
        experts = self.plan.model.experts
        self._sliced = frozenset(experts.layers if experts and self.plan.model.slices > 1 else ())
        """Layers whose experts all ranks have slices of: they are routed alike everywhere."""
        routers = drawn_routers(self.plan, 0 if self._sliced else number) if experts else None
        self.engine = SimulatedEngine(self.plan, options, routers, among)
        if self._sliced and self.engine.routed is not None:
            self.engine.routed.sharing = self

    def passes(self, batch: int) -> list[tuple[int, PartedPass]]:
        """So many equal ones at a time, for ``batch`` sequences."""
        work, decided = self.plan.workload, self.plan.decisions
        chunk = min(decided.prefill_chunk_tokens, work.prompt_tokens)
        parts = parts_of(batch * chunk, decided.prefill_part_tokens)
        cut = replace(decided, prefill_chunk_tokens=-(-chunk // parts), prefill_part_tokens=0)
        more = part_operations(parts, -(-batch * chunk // parts), decided.recorded_prompt_tokens)
        runs = passes_of(replace(self.plan, decisions=cut), self.engine.units, batch, more)
        least_ns = passes_of(self.plan, self.engine.units, batch)[0].each.least_ns
        begun_ns = ns(begun_issue_s(self.plan.hardware))  # once a pass
        each = [run.each for run in runs if run.each.prefill]
        prompt = [replace(one, least_ns=least_ns, before_ns=one.before_ns - (begun_ns if at % parts else 0)) for at, one in enumerate(each)]
        found = [(1, PartedPass(tuple(prompt[at : at + parts]))) for at in range(0, len(prompt), parts)]
        return found + [(run.count, PartedPass((run.each,))) for run in runs if not run.each.prefill]

    def begin_batch(self, batch: int, passes: Sequence[tuple[int, PartedPass]]) -> None:
        """``passes`` of so many sequences come next."""
        self.engine.begin_batch(batch, [Passes(count, one.whole) for count, one in passes])

    def passing(self, asked: PartedPass) -> Iterator[Wait]:
        """This rank's part of one pass, in steps between which something is waited for."""
        engine, parts, last_layer = self.engine, asked.parts, self._dealing.layers - 1
        before = engine.begin_pass(parts[0])
        launching = engine.lanes.of[LAUNCH]
        handed = frozenset() if parts[0].prefill else engine.on_host
        own_layers = len(self._dealing.of(self.number))
        ends = iter([*sorted(unit.layer + 1 for unit in handed), own_layers])
        launched = self._launch(parts, 0, next(ends) / own_layers)
        yield from engine.embed(sum(part.before_ns for part in parts))
        layers = [(at, unit) for at, unit in enumerate(engine.units) if unit.kind != "head"]
        for layer, owner in enumerate(self._dealing.owners):
            if owner != self.number:
                yield from self._serve(layer, parts[0])
                continue
            own = [(at, unit) for at, unit in layers if unit.layer == self._dealing.local(layer)]
            for number, part in enumerate(parts):
                if layer and self._dealing.owner(layer - 1) != self.number:
                    yield from self._arrival(layer, number)
                for at, unit in own:
                    if unit in handed:
                        yield Wait(lambda: not launching.moving, "launching")
                    yield from engine.visit(part, at, number == 0, number == len(parts) - 1)
                    if unit in handed:
                        launched = self._launch(parts, launched, next(ends) / own_layers)
                if layer < last_layer and self._dealing.owner(layer + 1) != self.number:
                    self._send(layer + 1, number, part)
        yield from self._logits(parts[-1], self._dealing.owner(last_layer))
        yield Wait(lambda: not launching.moving, "launching")
        engine.end_pass(parts[0], before)

    def _launch(self, parts: Sequence[Pass], since: float, until: float) -> float:
        """What the pass launches from one share of its layers until another one -> that. Whoever hands a unit to the CPU launches nothing
        beyond it until that is done."""
        if launch_ns := round(sum(part.launch_ns for part in parts) * (until - since)):
            self.engine.lanes.add(LAUNCH, Work(("launch",), "launching", 0, lambda: None), launch_ns)
        return until

    def tell(self, layer: int, each: Pass) -> None:
        """See :class:`penstock.planner.simulate.routed_layers.Sharing`."""
        nbytes = self._rows(each) * told_bytes(self.plan.model)
        self._hop(f"{TOLD}.{layer}", 0, self._widest.hop_of(nbytes), nbytes)

    def gather(self, layer: int) -> Iterator[Wait]:
        """See :class:`penstock.planner.simulate.routed_layers.Sharing`."""
        for other in range(self._dealing.count):
            if other != self.number:
                yield from self._arrival(f"{MADE}.{layer}", other)

    def _serve(self, layer: int, part: Pass) -> Iterator[Wait]:
        """Compute with this rank's slices of another one's ``layer``, where it has some."""
        routed = self.engine.routed
        if routed is not None and layer in self._sliced:
            yield from self._arrival(f"{TOLD}.{layer}", 0)
            yield self.engine.lanes.do(COMPUTE, Work(("served", layer), f"served.{layer}", 0, lambda: None), part.served_ns)
            yield from routed.route(part, layer)
            nbytes = self._rows(part) * self._state_bytes
            self._hop(f"{MADE}.{layer}", self.number, self._widest.hop_of(nbytes), nbytes)

    def _logits(self, part: Pass, owner: int) -> Iterator[Wait]:
        """The last hidden states go to all ranks, each multiplies by its rows of the LM head, and the first one has all logits."""
        engine, count = self.engine, self._dealing.count
        if self.number == owner:
            self._hop(LAST, 0, self._behind_s(part))
        else:
            yield from self._arrival(LAST, 0)
        for at, unit in enumerate(engine.units):
            if unit.kind == "head":
                yield from engine.visit(part, at)
        if self.number:
            self._hop(LOGITS, self.number, self._behind_s(part))
            return
        for other in range(1, count):
            yield from self._arrival(LOGITS, other)

    def _arrival(self, what: object, number: int) -> Iterator[Wait]:
        since = self.engine.lanes.now
        yield Wait(lambda: (what, number) in self._here, f"{what}, part {number}")
        self.engine.record.waited(COMPUTE, HOP, f"{what}.{number}", since, self.engine.lanes.now)

    def _send(self, layer: int, number: int, part: Pass) -> None:
        nbytes = self._rows(part) * self._state_bytes
        hardware, ranks_a_host = self._whole.hardware, self._dealing.count // self._whole.hardware.hosts
        far = self.number // ranks_a_host != self._dealing.owner(layer) // ranks_a_host
        way = hardware.network if far and hardware.network is not None else hardware.links
        self._hop(layer, number, recorded_hop_s(hardware, nbytes) if self._is_recorded(part) else way.hop_of(nbytes), nbytes)

    def _is_recorded(self, part: Pass) -> bool:
        return self._steps_recorded and not part.prefill

    def _rows(self, part: Pass) -> int:
        return round(part.kv_new) * self.plan.decisions.batch

    @property
    def _state_bytes(self) -> int:
        """Of a token."""
        return self.plan.model.hidden * self.plan.model.compute_dtype.nbytes

    @property
    def _widest(self) -> Links | Network:
        """The way to the farthest rank."""
        hardware = self._whole.hardware
        return hardware.links if hardware.hosts == 1 or hardware.network is None else hardware.network

    def _behind_s(self, part: Pass) -> float:
        return self._whole.hardware.links.word_hop_s if self._is_recorded(part) else self._widest.hop_s

    def _hop(self, what: object, number: int, seconds: float, nbytes: int = 0) -> None:
        done = partial(self._here.add, (what, number))
        self.engine.lanes.add(HOP, Work((what, number), f"{what}.{number}", nbytes, done), ns(seconds))


def _unshared(share: HardwareProfile, whole: HardwareProfile, number: int) -> HardwareProfile:
    """A rank's ``share`` of the machine ``whole``, on which its card has that number. Whole are what the ranks of a host divide as they go:
    drive, links, bus."""
    return replace(
        share,
        ssd_read=whole.ssd_read,
        ssd_write_gbps=whole.ssd_write_gbps,
        ssd_long_gbps=whole.ssd_long_gbps,
        dram_bus_gbps=whole.dram_bus_gbps,
        gpu=None if whole.gpu is None else whole.card(number).gpu,
    )

"""The program's terms of units that the CPU computes beside the card, in decode steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.planner.common.measures import GB
from penstock.planner.contract.decided.placement import head_block, head_blocks
from penstock.planner.contract.given.unit_spec import UnitKind, UnitSpec
from penstock.planner.contract.prices.beside import Beside
from penstock.planner.contract.prices.on_cpu import head_rows_timed, host_rows_timed, never_on_host, no_hand_over
from penstock.planner.contract.prices.price import Amount, Price, Resource, total
from penstock.planner.solver.terms.linear import LinearProgram
from penstock.planner.solver.terms.menu import MENUS
from penstock.planner.solver.terms.problem import Problem
from penstock.planner.solver.terms.ring_terms import RingTerms


class HostTerms:
    """How many FFN units and blocks of the LM head the CPU computes, of ``outside`` that DRAM keeps and VRAM does not. None where a step is
    ``interrupted``: by KV that lies outside VRAM, of several ranks by the drive. FFN units alone where it is ``launched``."""

    def __init__(
        self,
        program: LinearProgram,
        problem: Problem,
        outside: Mapping[UnitKind, Amount],
        interrupted: Amount,
        launched: Amount,
        ticks_per_s: float,
    ):
        self._program, self._problem, self._ticks_per_s = program, problem, ticks_per_s
        self._launched = launched if problem.model.dealt is None else 0
        """1 where the interpreter hands units over, though a step could be recorded."""
        force = problem.force
        most = {UnitKind.ffn: most_host_units(problem), UnitKind.head: most_host_blocks(problem)}
        forced = {UnitKind.ffn: force.host_ffn, UnitKind.head: force.host_head}
        self.most = sum(most.values())
        """Of any kind, as far as machine, model and batch have a say."""
        self.decided: dict[UnitKind, Amount] = {kind: count or 0 for kind, count in forced.items()}
        """Units of the plan; ``count`` of them the CPU computes in the workload's steps, all or none."""
        self.count: dict[UnitKind, Amount] = dict.fromkeys(most, 0)
        self.any: Amount = 0
        self.most_blocks = most[UnitKind.head]
        for kind, name in ((UnitKind.ffn, "host"), (UnitKind.head, "host_head")):
            if not most[kind]:
                if forced[kind]:
                    program.add(outside[kind] >= forced[kind])
                    if not isinstance(interrupted, int):
                        program.add(interrupted <= 0)
                continue
            self.decided[kind] = self.count[kind] = program.integer(name, 0, most[kind], forced[kind])
            program.add(self.count[kind] <= outside[kind])
        if not self.most:
            return
        if most[UnitKind.head]:
            program.add(self.count[UnitKind.head] <= most[UnitKind.head] * (1 - self._launched))
        self.any = program.integer("host_any", 0, 1)
        for kind, count in self.count.items():
            if most[kind]:
                program.add(count <= most[kind] * self.any)
        program.add(self.any <= sum(self.count.values()))
        program.add(self.any <= 1 - interrupted)

    def streamed(self, units: Mapping[UnitKind, Amount]) -> dict[UnitKind, Amount]:
        """Of ``units`` outside VRAM those that a decode step copies."""
        return {kind: count - self.count.get(kind, 0) for kind, count in units.items()}

    def step(self, copies_t: Amount, head_t: Amount, most_t: float, reads_t: Amount, most_reads_t: Amount) -> Price:
        """What a step costs with these units beyond its copies: ``copies_t`` ticks, ``head_t`` for the LM head, ``most_t`` at most; and
        beyond what it reads from the SSD, ``reads_t`` ticks, ``most_reads_t`` at most. Where the CPU is through ``sooner``, copies slow all
        that it does."""
        p = self._problem
        beside, units = Beside.of(p.hardware, p.model, p.batch, p.forms), p.model.of_kind(UnitKind.ffn)
        price, idle_t = Price(), head_t
        slowed_t, most_slowed_t = 0, 0.0
        if most := most_host_units(p):
            each_t = sum(map(beside.slowed_s, units)) * self._ticks_per_s / len(units)
            slowed_t, most_slowed_t = self.count[UnitKind.ffn] * each_t, most * each_t
            price += total(beside.computed(unit) for unit in units) * (self._ticks_per_s / len(units)) * self.count[UnitKind.ffn]
            price += self._by_interpreter(beside, units)
            if not isinstance(self._launched, int) and (crowding := beside.crowding(units)):
                crowded_t = self._program.amount("host_crowded_t")
                self._program.add(crowded_t >= crowding * (reads_t - most_reads_t * (1 - self.any)))
                price += Price(dict.fromkeys((Resource.cpu, Resource.h2d), crowded_t))
        if self.most_blocks:
            block = head_block(p.model, head_blocks(p.model))
            meanwhile_t = self.count[UnitKind.head] * (beside.meanwhile_s(block) * self._ticks_per_s)
            block_t = beside.slowed_s(block) * self._ticks_per_s
            slowed_t, most_slowed_t = slowed_t + self.count[UnitKind.head] * block_t, most_slowed_t + self.most_blocks * block_t
            idle_t, rests_t = self._program.amount("host_idle_t"), self._program.amount("host_rests_t")
            self._program.add(idle_t >= head_t - meanwhile_t)
            self._program.add(rests_t >= (meanwhile_t - head_t) * beside.resting)
            price += beside.computed(block) * self._ticks_per_s * self.count[UnitKind.head] + Price(rests=rests_t)
        held_up_t, sooner = self._program.amount("host_held_up_t"), self._program.integer("host_sooner", 0, 1)
        most_held_up_t = beside.held_up(most_t, most_t)
        self._program.add(held_up_t >= beside.held_up(copies_t, idle_t) - most_held_up_t * (1 - self.any + sooner))
        self._program.add(held_up_t >= slowed_t + idle_t - (most_slowed_t + most_t) * (1 - sooner))
        return price + Price({Resource.cpu: held_up_t})

    def _by_interpreter(self, beside: Beside, units: Sequence[UnitSpec]) -> Price:
        """What FFN ``units`` take more where the interpreter hands them over."""
        if isinstance(self._launched, int):
            return Price()
        slower, count = replace(beside, launched=True), self.count[UnitKind.ffn]
        handed_t = sum(map(slower.handed_s, units)) / len(units) * self._ticks_per_s
        more_t = handed_t - sum(map(beside.handed_s, units)) / len(units) * self._ticks_per_s
        more, handing = self._program.amount("host_launched_t"), self._program.amount("host_handing_t")
        for amount, each_t in ((more, more_t), (handing, handed_t)):
            self._program.add(amount >= each_t * count - each_t * len(units) * (1 - self._launched))
        return Price({Resource.cpu: more}, handing=handing)

    def keep_slots(self, ring: RingTerms) -> None:
        """Several ranks that wait for the CPU in turn do so with full slots: where it computes units, FFN units have more than one."""
        if self._problem.model.dealt is not None:
            self._program.add(self.any + ring.one_ffn_slot <= 1)

    def widen_ring(self, ring: RingTerms, kept: Amount, most: int) -> None:
        """``ring`` is one with :attr:`Menus.beside_attention` slots of attention or more where both kinds stream. VRAM that keeps none of
        its ``most`` units, ``kept``, may have no room for that."""
        bare = self._program.integer("bare", 0, 1)
        self._program.add(kept <= most * (1 - bare))
        self._program.add(self.any <= ring.wide(MENUS.beside_attention) + bare)


def wider(problem: Problem) -> tuple[int, ...]:
    """Slots of the smallest ring with :attr:`Menus.beside_attention` of attention, where one is needed: an FFN is copied so much longer
    than the CPU, where it may, multiplies by one that its copy keeps attention waiting. A forced ring stays as it is. Of several ranks each
    link copies the fewer units."""
    p = problem
    if not most_host_units(p) or p.hardware.gpu is None or p.model.dealt is not None or p.force.vram_slots is not None:
        return ()
    beside = Beside.of(p.hardware, p.model, p.batch, p.forms)
    largest = max(p.model.of_kind(UnitKind.ffn), key=lambda unit: unit.stored_bytes)
    copied_s = largest.stored_bytes / p.hardware.gpu.h2d.peak / GB
    slower = copied_s > MENUS.beside_slower * beside.alone_s(largest) / beside.rates.beside_h2d
    return (2 * MENUS.beside_attention - 1,) if slower else ()


def most_host_units(problem: Problem) -> int:
    """FFN units that the CPU may compute, as far as machine, model and batch have a say; none where memory cannot hold the layers, so that
    each pass reads the SSD, of several ranks, and where that takes longer than copying all that VRAM cannot hold."""
    p, short = problem, _short(problem)
    if not _may(p, host_rows_timed(p.hardware, p.model)):
        return 0
    too_short = short > 0 and (p.model.dealt is not None or (p.force.host_ffn is None and _reads_longer(p, short)))
    return 0 if too_short else p.model.layers


def most_host_blocks(problem: Problem) -> int:
    """The same of blocks of the LM head; none, either, where each pass reads the SSD, or CPU and link are no faster together than one after
    the other, or the user leaves all FFN units to the card and says nothing of the head."""
    p = problem
    host, wanted = p.hardware.host, p.force.host_ffn if p.force.host_head is None else p.force.host_head
    if host is None or wanted == 0 or never_on_host(p.model) or _short(p) > 0 or not _may(p, head_rows_timed(p.hardware, p.model)):
        return 0
    return head_blocks(p.model) if p.force.host_head is not None or host.beside_h2d + host.h2d_beside > 1 else 0


def _may(problem: Problem, timed: int) -> bool:
    """Whether the CPU may compute units with which products of so many rows were timed."""
    p = problem
    rows = timed if p.force.host_rows is None else p.force.host_rows
    return p.batch <= rows <= timed and not no_hand_over(p.hardware, p.model)


def _short(problem: Problem) -> int:
    """Bytes of layers for which VRAM and DRAM have no room; 0 or less where all of them may find some."""
    p = problem
    return sum(p.model.attn_bytes) + sum(p.model.ffn_bytes) - p.hardware.vram_bytes - p.hardware.dram_bytes


def _reads_longer(problem: Problem, short: int) -> bool:
    """Whether reading ``short`` bytes takes longer than copying all layers for which VRAM has no room."""
    p = problem
    assert p.hardware.gpu is not None
    copied = short + p.hardware.dram_bytes
    return short / p.hardware.ssd_peak_gbps > copied / p.hardware.gpu.h2d.peak

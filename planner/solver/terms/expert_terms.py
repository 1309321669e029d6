"""Slots for routed experts in the integer program: what they take, and the ticks of what passes still move."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pulp

from penstock.planner.common.measures import GB
from penstock.planner.contract.bills.routed import Fetched, Routed, Streamed, held_up
from penstock.planner.contract.decided.decisions import ExpertSlots, MissedExperts, Tier
from penstock.planner.contract.experts.expert_misses import Misses, Visit, visit
from penstock.planner.contract.experts.expert_slots import fewest_slots
from penstock.planner.contract.given.model import ALONE_MORE
from penstock.planner.contract.prices.late_experts import LateExperts
from penstock.planner.contract.prices.missed_experts import Missed
from penstock.planner.contract.prices.price import Amount, Price, Resource
from penstock.planner.contract.prices.price_table import passed
from penstock.planner.contract.prices.stages import expert_copy_s, late_read_s
from penstock.planner.solver.terms.linear import MB, LinearProgram
from penstock.planner.solver.terms.menu import SsdChoice, expert_chunk_bytes
from penstock.planner.solver.terms.problem import Problem

NOT_LATE = LateExperts()


class ExpertTerms:
    """Whole slots by tier, and of those the ones that keep an expert. Times are in ticks. Of a dense model all is 0."""

    copied: pulp.LpAffineExpression | int = 0
    """Whether any expert passes through VRAM."""
    read: pulp.LpVariable | int = 0
    """Whether any is read from the SSD after loading."""
    chunk_bytes: int = 0
    """Of a copy to the card; 0 without one."""
    host = MissedExperts.copied
    """What becomes of missed experts."""

    def __init__(
        self,
        program: LinearProgram,
        problem: Problem,
        ssd: tuple[Sequence[pulp.LpVariable], Sequence[SsdChoice]],
        kv_bytes: int,
        ticks_per_s: float,
    ):
        """``kv_bytes``: of all layers at the sequences' end."""
        self.experts = problem.model.experts
        self.slots: dict[Tier, pulp.LpAffineExpression | int] = {Tier.vram: 0, Tier.dram: 0}
        if self.experts is None:
            return
        self._program, self._problem, gpu = program, problem, problem.hardware.gpu
        self._kept: dict[Tier, pulp.LpVariable | int] = {Tier.vram: 0, Tier.dram: 0}
        self._fetched: dict[Visit, tuple[list[pulp.LpVariable], pulp.LpVariable | int]] = {}
        self._ssd_bits, choices = ssd
        self._read_t = [self.experts.expert_bytes / GB / c.gbps * ticks_per_s for c in choices]
        self._late_s = [late_read_s(problem.hardware, problem.model, c.block_bytes, c.queue_depth) for c in choices]
        self._copy_t, self._tick_s = 0.0, 1 / ticks_per_s
        self._vram_more: pulp.LpVariable | int = 0
        all_vram: pulp.LpVariable | int = 0
        if gpu:
            in_flight = problem.force.apply_to_experts(ExpertSlots(0, 0)).in_flight
            self.chunk_bytes = problem.force.expert_chunk_bytes or expert_chunk_bytes(
                problem.hardware, problem.model, problem.workload, problem.batch, in_flight
            )
            copied = Price({Resource.h2d: expert_copy_s(gpu, self.experts, self.chunk_bytes)})
            self._copy_t = copied.of(Resource.h2d) * ticks_per_s
            self.host = MissedExperts(problem.force.expert_host or MissedExperts.copied)
            slots = ExpertSlots(0, 0, chunk_bytes=self.chunk_bytes, host=self.host)
            copied += passed(problem.hardware, self.experts.expert_bytes)
            self._missed_price = Missed.of(problem.hardware, problem.model, slots, problem.batch, kv_bytes, copied)
            self._vram_more = program.integer("experts_vram_more", 0, 1)
            all_vram = self._tier(Tier.vram, problem.force.expert_vram_slots, 0)
            self.copied = 1 - all_vram
        all_dram = self._tier(Tier.dram, problem.force.expert_dram_slots, all_vram)
        self.read = program.integer("experts_read", 0, 1)
        program.add(self.read >= 1 - all_vram - all_dram)

    def _tier(self, tier: Tier, forced: int | None, idle: pulp.LpVariable | int) -> pulp.LpVariable:
        """Variables of one tier, which needs no slots where ``idle``; whether it has one for every expert."""
        assert self.experts is not None
        program, units, fewest = self._program, self.experts.units, fewest_slots(self.experts)
        kept = program.integer(f"experts_kept_{tier}", 0, units)
        every, none = program.integer(f"experts_all_{tier}", 0, 1), program.integer(f"experts_none_{tier}", 0, 1)
        passing = max(0, units - 1 - fewest)
        program.add(kept <= passing + (units - passing) * every)
        program.add(kept >= units * every)
        program.add(kept <= units * (1 - none))
        program.add(every + none <= 1)
        program.add(none <= idle)
        slots = kept + fewest * (1 - every - none)
        if units <= fewest:
            program.add(every + none == 1)
        if forced is not None:
            program.add(slots == forced)
        self._kept[tier], self.slots[tier] = kept, slots
        return every

    def each_pass(self, tokens: int, late: LateExperts = NOT_LATE) -> Price:
        """Ticks of reading, of copying, and of waiting for the experts that a pass over ``tokens`` tokens misses."""
        if self.experts is None:
            return Price()
        read, copied = self._missed(tokens)
        passed_mb = (pulp.lpSum(read) + copied) * (self.experts.expert_bytes / MB)
        ticks = {Resource.ssd: self._program.dot(read, self._read_t), Resource.h2d: copied * self._copy_t}
        if self._problem.hardware.gpu:
            waited = late.copied(copied, self._copy_t)
        else:
            waited = late.brought(ticks[Resource.ssd], self._program.dot(self._ssd_bits, self._read_t))
        return Price(ticks) + passed(self._problem.hardware, passed_mb * (MB / self._tick_s)) + waited

    def each_step(self) -> Price:
        """The same of a decode step, whose missed experts the CPU may share."""
        if self.experts is None:
            return Price()
        if not self._problem.hardware.gpu:
            return self.each_pass(self._problem.batch)
        read, copied = self._missed(self._problem.batch)
        total = pulp.lpSum(read)
        ticks = {Resource.ssd: self._program.dot(read, self._read_t), Resource.h2d: total * self._copy_t}
        twice = passed(self._problem.hardware, total * (2 * self.experts.expert_bytes / self._tick_s))
        return Price(ticks) + twice + self._missed_price.bill * (1 / self._tick_s) * (copied - total)

    def most(self, tokens: int, late: LateExperts) -> Price:
        """The most that they can be."""
        if self.experts is None:
            return Price()
        most = len(self.experts.layers) * visit(self.experts, tokens).touched
        ticks = {Resource.ssd: most * max(self._read_t), Resource.h2d: most * self._copy_t}
        twice = passed(self._problem.hardware, 2 * most * self.experts.expert_bytes / self._tick_s)
        gpu = self._problem.hardware.gpu
        waited = late.copied(most, self._copy_t) if gpu else late.brought(ticks[Resource.ssd], min(self._read_t))
        return Price(ticks) + twice + waited

    def routed_t(self, compute_t: Amount, streamed_t: Streamed, launched: Amount) -> Iterator[Amount]:
        """Ticks of a decode step that its routers hold up: at least each of these. ``launched``: see :class:`Fetched`."""
        if self.experts is None:
            return
        p, tick_s = self._problem, self._tick_s
        read, copied = self._missed(p.batch)
        reads = [(n, t * tick_s, late_s) for n, t, late_s in zip(read, self._read_t, self._late_s, strict=True)]
        copy_s = self._copy_t * tick_s
        missed = self._missed_price if p.hardware.gpu else Missed(Price())
        pieces = self.experts.pieces(self.chunk_bytes) if self.chunk_bytes else 1
        fetched = Fetched(reads, copied, copy_s, self.read, missed, p.expected, copy_s / pieces, launched)
        yield from held_up(Routed.of(p.hardware, p.model, p.batch), compute_t, tick_s, streamed_t, fetched, tick_s)

    @property
    def reads_apart(self) -> bool:
        """Whether the step's law goes by what it is expected to miss."""
        return self.experts is not None and Routed.of(self._problem.hardware, self._problem.model, self._problem.batch).asked > 0

    def expected(self) -> Misses:
        """What a decode step of the solved program misses."""
        assert self.experts is not None
        read, copied = self._missed(self._problem.batch)
        return Misses(float(pulp.value(copied)), sum(float(pulp.value(n)) for n in read))

    def _missed(self, tokens: int) -> tuple[list[pulp.LpVariable], pulp.LpVariable | int]:
        """Experts of all layers that a pass reads, at each choice of reads, and those that it copies."""
        assert self.experts is not None
        one, name = visit(self.experts, tokens, self.host), f"experts_{len(self._fetched)}"
        if one not in self._fetched:
            most = len(self.experts.layers) * one.touched
            copied: pulp.LpVariable | int = 0
            if self._problem.hardware.gpu:
                copied = self._program.amount(f"{name}_copied", most)
                self._lines(copied, one, self._kept[Tier.vram])
            read = self._program.amount(f"{name}_read", most)
            for more, fewer, unless in self._either():
                self._lines(read, one, more + one.second_tier * fewer, unless)
                left = self.experts.units - more
                self._lines(read, one, more + one.alone * left + ALONE_MORE * fewer, unless)
                self._lines(read, one, more + one.alone_most * left, unless)
            self._fetched[one] = self._program.shares(f"{name}_read", self._ssd_bits, read, most), copied
        return self._fetched[one]

    def _either(self) -> Iterator[tuple[pulp.LpAffineExpression | int, pulp.LpAffineExpression | int, pulp.LpAffineExpression | int]]:
        """(the tier that keeps more, the other, 1 where it is the other way round); the program takes the better of both."""
        vram, dram = self._kept[Tier.vram], self._kept[Tier.dram]
        if self._problem.hardware.gpu:
            yield vram, dram, 1 - self._vram_more
        yield dram, vram, self._vram_more

    def _lines(self, missed: pulp.LpVariable, one: Visit, kept: pulp.LpAffineExpression, unless: pulp.LpAffineExpression | int = 0) -> None:
        """``missed`` is at least each line of the curve, which is exact, since it is convex; any, where ``unless`` is 1."""
        layers = len(self.experts.layers) if self.experts else 0
        for none, each in one.lines:
            self._program.add(missed >= layers * none * (1 - unless) - each * kept)

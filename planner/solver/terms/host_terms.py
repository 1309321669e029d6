"""The program's terms of units that the CPU computes beside the card, in decode steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.planner.common.measures import GB
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.prices.beside import Beside, host_rows_timed, no_hand_over
from penstock.planner.contract.prices.price import Amount, Price, Resource, total
from penstock.planner.solver.terms.linear import LinearProgram
from penstock.planner.solver.terms.menu import MENUS
from penstock.planner.solver.terms.problem import Problem

Ring = tuple[tuple[int, ...], int]
"""Whether attention, FFN and LM-head units stream through it, 1 or 0 each, and its slots."""


class HostTerms:
    """How many FFN units the CPU computes, of ``outside`` that VRAM does not keep. None where a step is ``interrupted``: by the drive, or
    by KV that lies outside VRAM."""

    def __init__(self, program: LinearProgram, problem: Problem, outside: Amount, interrupted: Amount, ticks_per_s: float):
        self._program, self._problem, self._ticks_per_s = program, problem, ticks_per_s
        self.most = most_host_units(problem)
        self.decided: Amount = problem.force.host_ffn or 0
        """Units of the plan; ``count`` of them the CPU computes in the workload's steps, all or none."""
        self.count: Amount = 0
        self.any: Amount = 0
        if not self.most:
            if self.decided:
                program.add(outside >= self.decided)
                program.add(interrupted <= 0)
            return
        self.count = program.integer("host", 0, self.most, problem.force.host_ffn)
        self.any = program.integer("host_any", 0, 1)
        program.add(self.count <= outside)
        program.add(self.count <= self.most * self.any)
        program.add(self.any <= self.count)
        program.add(self.any <= 1 - interrupted)
        self.decided = self.count

    def streamed(self, units: Mapping[UnitKind, Amount]) -> dict[UnitKind, Amount]:
        """Of ``units`` outside VRAM those that a decode step copies."""
        return {kind: count - self.count if kind is UnitKind.ffn else count for kind, count in units.items()}

    def step(self, copies_t: Amount, head_t: Amount, most_t: float) -> Price:
        """What a step costs with these units beyond its copies: ``copies_t`` ticks, ``head_t`` for the LM head, ``most_t`` at most."""
        p = self._problem
        beside, units = Beside.of(p.hardware, p.model, p.batch, p.forms), p.model.of_kind(UnitKind.ffn)
        mean = total(beside.computed(unit) for unit in units) * (self._ticks_per_s / len(units))
        held_up_t = self._program.amount("host_held_up_t")
        self._program.add(held_up_t >= beside.held_up(copies_t, head_t) - beside.held_up(most_t, most_t) * (1 - self.any))
        return mean * self.count + Price({Resource.cpu: held_up_t})

    def widen_ring(self, rings: Sequence[tuple[Amount, Ring]], kept: Amount, most: int) -> None:
        """Of ``rings``, bits and what they stand for, one of :attr:`Menus.beside_slots` or more where both kinds stream. VRAM that keeps
        none of its ``most`` units, ``kept``, may have no room for that."""
        enough = [bit for bit, (streams, slots) in rings if slots >= MENUS.beside_slots or not (streams[0] and any(streams[1:]))]
        bare = self._program.integer("bare", 0, 1)
        self._program.add(kept <= most * (1 - bare))
        self._program.add(self.any <= sum(enough) + bare)


def wide_ring(problem: Problem) -> bool:
    """Whether an FFN is copied so much longer than the CPU, where it may, multiplies by one that its copy keeps attention waiting. A forced
    ring stays as it is. Of several ranks each link copies the fewer units."""
    p = problem
    if not most_host_units(p) or p.hardware.gpu is None or p.model.dealt is not None or p.force.vram_slots is not None:
        return False
    beside = Beside.of(p.hardware, p.model, p.batch, p.forms)
    largest = max(p.model.of_kind(UnitKind.ffn), key=lambda unit: unit.stored_bytes)
    copied_s = largest.stored_bytes / p.hardware.gpu.h2d.peak / GB
    return copied_s > MENUS.beside_slower * beside.alone_s(largest) / beside.rates.beside_h2d


def most_host_units(problem: Problem) -> int:
    """FFN units that the CPU may compute, as far as machine, model and batch have a say; none where memory cannot hold the layers, so that
    each pass reads the SSD."""
    p = problem
    if sum(p.model.attn_bytes) + sum(p.model.ffn_bytes) > p.hardware.vram_bytes + p.hardware.dram_bytes:
        return 0
    rows = host_rows_timed(p.hardware, p.model) if p.force.host_rows is None else p.force.host_rows
    return p.model.layers if p.batch <= rows and not no_hand_over(p.hardware, p.model) else 0

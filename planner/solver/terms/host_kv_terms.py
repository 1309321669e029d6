"""The program's terms of layers that the CPU attends to beside the card, in decode steps."""

from __future__ import annotations

from collections.abc import Sequence

import pulp

from penstock.planner.contract.bills.phase import Phase
from penstock.planner.contract.prices.beside import Beside
from penstock.planner.contract.prices.on_cpu import no_host_attention
from penstock.planner.contract.prices.price import Amount, Price, Resource
from penstock.planner.contract.prices.price_table import KvPrice
from penstock.planner.solver.terms.linear import LinearProgram
from penstock.planner.solver.terms.problem import Problem


class HostKvTerms:
    """How many layers' attention the CPU computes, of those ``in_dram``. Times in ticks; ``layer_bytes``: K and V of one layer."""

    def __init__(self, program: LinearProgram, problem: Problem, in_dram: Amount, layer_bytes: int, ticks_per_s: float):
        self._program, self._problem, self._layer_bytes, self._ticks_per_s = program, problem, layer_bytes, ticks_per_s
        self.most = most_attended(problem)
        self.count: Amount = 0
        self.any: Amount = 0
        forced = problem.force.host_attention
        if not self.most:
            if forced:
                program.add(program.integer("kv_host", 0, 0) >= forced)
            return
        self.count = program.integer("kv_host", 0, self.most, forced)
        self.any = program.integer("kv_host_any", 0, 1)
        program.add(self.count <= in_dram)
        program.add(self.count <= self.most * self.any)
        program.add(self.any <= self.count)

    def step(self, units: Price, copies_t: Amount, head_t: Amount, most_t: float) -> Price:
        """``units`` of a step, whose copies take ``copies_t``, ``head_t`` of it for the LM head, and ``most_t`` at most."""
        beside = self._beside
        return units + beside.hop * (self.count * self._ticks_per_s) + self._waits("weights", copies_t, head_t, most_t)

    def kv(self, kv: KvPrice, outside: Amount, each_t: Sequence[tuple[pulp.LpVariable, float]]) -> KvPrice:
        """``kv`` in a step. Of the layers ``outside`` one is copied in the ticks that stand beside the chunk's bit that is set."""
        copies_t = self._program.amount("step_kv_h2d_t")
        for bit, layer_t in each_t:
            self._program.add(copies_t >= (outside - self.count) * layer_t - self.most * layer_t * (1 - bit))
        attended = self._beside.attended(self._layer_bytes).without(Resource.dram)  # K and V pass the bus once, copied or not
        read = kv.read.without(Resource.h2d) + Price({Resource.h2d: copies_t}) + attended * (self.count * self._ticks_per_s)
        waits = self._waits("kv", copies_t, 0.0, self.most * max(layer_t for _, layer_t in each_t))
        return KvPrice(read + waits, kv.back, kv.written)

    def launched_ahead(self, phase: Phase) -> Price:
        """What the interpreter launches of a step, ``phase`` in ticks, while the CPU attends."""
        ahead_t = self._program.amount("kv_host_launches_t")
        self._program.add(ahead_t <= phase.launches.of(Resource.card))
        each_t = self._beside.attended(self._layer_bytes).of(Resource.cpu) * self._ticks_per_s
        self._program.add(ahead_t <= self.count * each_t * phase.kv_read)
        return Price(alongside=ahead_t)

    @property
    def _beside(self) -> Beside:
        return Beside.of(self._problem.hardware, self._problem.model, self._problem.batch, self._problem.forms).attends

    def _waits(self, name: str, copies_t: Amount, head_t: Amount, most_t: float) -> Price:
        """What copies hold up the CPU, where it attends to anything."""
        waits_t, beside = self._program.amount(f"kv_host_{name}_t"), self._beside
        self._program.add(waits_t >= beside.held_up(copies_t, head_t) - beside.held_up(most_t, most_t) * (1 - self.any))
        return Price({Resource.cpu: waits_t})


def most_attended(problem: Problem) -> int:
    """Layers that the CPU may attend to, as far as machine, model and workload have a say."""
    p = problem
    spills = p.workload.kv_spill and not p.workload.is_served
    return p.model.layers if spills and not no_host_attention(p.hardware, p.model) else 0

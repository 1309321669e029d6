"""The VRAM ring in the integer program: which kinds of units stream, through how many slots, and what passes wait for a kind's only one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import pulp

from penstock.planner.contract.bills.phase import Phase
from penstock.planner.contract.bills.ring_slots import OneFfnSlot
from penstock.planner.contract.decided.placement import ring_classes
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.prices.price import NOTHING, Amount, Price, Resource
from penstock.planner.contract.prices.sizes import unit_vram_bytes
from penstock.planner.solver.terms.linear import LinearProgram
from penstock.planner.solver.terms.menu import NO_RING, RingChoice, one_ffn_ring, ring_menu
from penstock.planner.solver.terms.problem import Problem

Streams = tuple[int, ...]
"""Whether attention, FFN and LM-head units stream, 1 or 0 each."""


class RingTerms:
    """One ring for each set of kinds that stream. ``block``: bytes of one of the LM head's ``head_blocks``; ``also``: slots that it may
    have beside those of the menu."""

    def __init__(self, program: LinearProgram, problem: Problem, head_blocks: int, block: int, also: Sequence[int]):
        self._program, self._problem, self._head_blocks, self._block = program, problem, head_blocks, block
        rings = ring_menu(problem.force, also) if problem.hardware.gpu else [NO_RING]
        kinds = list(product((0, 1), repeat=3))
        self._options = [(streams, ring) for streams in kinds for ring in (rings if any(streams) else rings[:1])]
        if problem.hardware.gpu:
            self._options += [(streams, ring) for streams in kinds if _both(streams) for ring in one_ffn_ring(problem)]
        self._bits = program.bits("ring", len(self._options))
        self.most_slots = max(ring.slots for ring in rings)
        self.busy = self._those(lambda streams, _: any(streams)) if problem.hardware.gpu else pulp.lpSum([])
        self.one_ffn_slot = self._those(lambda streams, ring: _both(streams) and ring.of_both[1] == 1)
        """Whether FFN units share one slot, and attention streams, too."""

    def streams(self, kind: int) -> pulp.LpAffineExpression:
        """Whether the kind of that number does."""
        return self._those(lambda streams, _: bool(streams[kind]))

    def both(self, attn: int, ffn: int) -> pulp.LpAffineExpression:
        """Whether attention and FFN units stream, as 1 or 0 each."""
        return self._those(lambda streams, _: streams[:2] == (attn, ffn))

    def wide(self, least: int) -> pulp.LpAffineExpression:
        """Whether attention has so many slots, or all."""
        return self._those(lambda streams, ring: ring.of_both[0] >= least or not _both(streams))

    @property
    def nbytes(self) -> pulp.LpAffineExpression:
        """Of VRAM, a unit taken as large as the largest of its kind."""
        return pulp.lpSum(bit * self._bytes(*option) for bit, option in zip(self._bits, self._options, strict=True))

    @property
    def choice(self) -> RingChoice:
        """Of a program that was minimised."""
        return next(ring for bit, (_, ring) in zip(self._bits, self._options, strict=True) if pulp.value(bit) > 0.5)

    @property
    def takes_one_ffn_slot(self) -> bool:
        """The same of :attr:`one_ffn_slot`."""
        return round(pulp.value(self.one_ffn_slot)) == 1

    def settle(self) -> None:
        """Whether FFN units share a slot stays as it is, of a program that was minimised."""
        if len(self.one_ffn_slot):
            self._program.add(self.one_ffn_slot == int(self.takes_one_ffn_slot))

    def lasts(
        self,
        phase_t: Amount,
        phase: Phase,
        bill: Price,
        streamed: Mapping[UnitKind, Amount],
        ticks_per_s: float,
        bit: pulp.LpVariable | int = 1,
        most: Price = NOTHING,
    ) -> None:
        """``phase_t`` is no less than ``bill`` with what link and card wait for each other while ``streamed`` units pass through one slot
        for FFN units, where the ring has one and ``bit`` is 1; ``most`` is what the bill can be. Ticks, but for ``phase``."""
        if not len(self.one_ffn_slot):
            return
        p, otherwise, no = self._problem, 1 - self.one_ffn_slot, 1 - bit
        one, scale = OneFfnSlot.of(p.hardware, p.model, phase, self._head_blocks), phase.passes * ticks_per_s
        every = {UnitKind.ffn: p.model.layers, UnitKind.head: self._head_blocks}
        link_t, most_link_t = bill.of(Resource.h2d) + bill.rests, most.of(Resource.h2d) + most.rests
        card_t, most_card_t = bill.of(Resource.card) + bill.behind, most.of(Resource.card) + most.behind
        most_rests_t, most_held_t = scale * max(one.rests(every)), scale * one.held(every)
        for rests in one.rests(streamed):
            self._program.add(phase_t >= link_t + scale * rests - most_rests_t * otherwise - (most_link_t + most_rests_t) * no)
        self._program.add(phase_t >= card_t + scale * one.held(streamed) - most_held_t * otherwise - (most_card_t + most_held_t) * no)

    def _those(self, wanted: Callable[[Streams, RingChoice], bool]) -> pulp.LpAffineExpression:
        return pulp.lpSum(bit for bit, option in zip(self._bits, self._options, strict=True) if wanted(*option))

    def _bytes(self, streams: Streams, ring: RingChoice) -> int:
        model = self._problem.model
        attn = streams[0] * model.attn_max
        ffn = max(streams[1] * model.ffn_max, streams[2] * self._block)
        return sum(count * unit_vram_bytes(size) for count, size in ring_classes(ring.slots, ring.ffn_slots, attn, ffn).values())


def _both(streams: Streams) -> bool:
    return bool(streams[0]) and any(streams[1:])

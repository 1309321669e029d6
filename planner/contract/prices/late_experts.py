"""What a pass over prompts waits for routed experts, beyond what the link or the drive takes for all of them: few come before their router
speaks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.planner.contract.experts.expert_misses import ALL_ASKED, visit
from penstock.planner.contract.experts.expert_slots import fewest_slots
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.prices.decoding import decode_s, unit_s
from penstock.planner.contract.prices.launches import OPERATIONS, are_grouped
from penstock.planner.contract.prices.price import NOTHING, Amount, Late, Price
from penstock.planner.contract.prices.stages import packed
from penstock.planner.contract.ranks.rank_chain import fetching_turns

BESIDE = 2
"""Links that carry at once while experts come ahead: that of the rank whose turn it is, and that of the one before."""


@dataclass(frozen=True)
class LateExperts:
    """Of a layer's u experts, each computed in e seconds, m are missing. Through s slots they pass, each copied in f seconds. One slot is
    left to what is demanded, so a = s - 1 are there when the router speaks. Those that were kept are computed before those that arrive.
    A layer waits for the longest of

        (m - a) * f - (u - 1) * e - launches            the copies
        (m - a - s) * f - (m - a - 2) * e - launches    the slots are full while what was kept is computed, if e < f

    An expert's launches are part of e, the others' go on while the layer waits.
    A pass that touches few experts knows none beforehand: a = 0, and routers name the share ``foreseen`` of them. Nothing comes ahead of a
    prompt's first layer, which may wait where no other does.

    Without a card the SSD brings them, and f is a read. While the CPU computes what else a layer has, the drive rests behind a experts.
    What has come is computed before what was kept, so slots are never full of it. Launches are the CPU's own: nothing hides them.

    Slices of an expert come to all ranks at once, at the rate that all links have together.

    Ranks have their layers in turn, so all layers' waits add up, and a link copies alone but for what comes ahead to another rank.
    """

    waits: float = 0.0
    """Of the missed experts, the share that no router names early; 0 for a model without any."""
    layers: float = 0.0
    """Of this rank."""
    first: float = 0.0
    """Of these, first ones of a prompt: one in all of its passes."""
    turns: float = 1.0
    """How many times as long as this rank's layers the whole model's take, one after the other."""
    alone: float = 1.0
    """Seconds of a copy while its link carries alone, of those at the rate that this rank is priced at."""
    ahead: float = 0.0
    """a, as if the other links were idle."""
    slots: int = 0
    """s; 0 without a card, where they do not matter."""
    touched: float = 0.0
    expert_s: float = 0.0
    launch_s: float = 0.0
    """Of a layer without its experts: what launching takes longer than computing."""

    @classmethod
    def of(cls, hardware: HardwareProfile, model: ModelSpec, rows: int, passes: int, launched_s: float) -> LateExperts:
        """Of a pass of ``passes`` over ``rows`` tokens each. ``launched_s``: of all of them, what launching takes longer than computing."""
        experts, gpu, links = model.experts, hardware.gpu, hardware.links
        if experts is None:
            return cls()
        ranks, touched, slots = fetching_turns(model), visit(experts, rows).touched, fewest_slots(experts)
        waits, ahead, alone = 1 - experts.foreseen, 0.0, links.held_to if model.slices == 1 else 1.0
        if touched >= ALL_ASKED * experts.count:
            waits, ahead = 1.0, ahead_of(hardware, model) * (1 - follows_itself(model)) if gpu else slots - 1.0
        unit, each_rows, layers = model.of_kind(UnitKind.expert)[0], rows * experts.top_k / touched, len(experts.layers)
        read_s, flops_s = unit_s(hardware, unit, each_rows), 2 * unit.elements * each_rows / hardware.dense_tflops / 1e12
        product_s = max(read_s, decode_s(hardware, unit, each_rows) + flops_s) if gpu else read_s + flops_s * packed(rows)
        grouped = are_grouped(hardware, model, rows)
        each, all_of_them = OPERATIONS.each(rows, gpu is not None, grouped), OPERATIONS.routed(experts, rows, gpu is not None, grouped)
        issued_s = launched_s / passes / layers / all_of_them
        return cls(
            waits,
            layers,
            1 / passes,
            ranks,
            alone,
            ahead,
            slots if gpu else 0,
            touched,
            product_s + each * issued_s,
            (all_of_them - touched * each) * issued_s if gpu else 0.0,
        )

    def in_units_of(self, seconds: float) -> LateExperts:
        """The same with so many seconds as the unit of time."""
        return replace(self, expert_s=self.expert_s / seconds, launch_s=self.launch_s / seconds)

    def copied(self, missed: Amount, copy_s: float) -> Price:
        """Of one pass that misses so many experts in all of this rank's layers, each copied in ``copy_s``. Linear in ``missed``."""
        if not self.waits:
            return NOTHING
        copy_s, each_s, ahead = copy_s * self.alone, self.expert_s, self.ahead * (self.layers - self.first)
        found = self.brought(missed * copy_s, copy_s)
        if each_s >= copy_s:
            return found
        full = (missed - ahead - self.layers * self.slots) * copy_s
        full -= (missed - ahead - 2 * self.layers) * each_s + self.layers * self.launch_s
        return found + Price(late={Late.full: full * (self.waits * self.turns)})

    def brought(self, all_s: Amount, one_s: Amount) -> Price:
        """The same where slots are never full: ``all_s`` brings all that the pass misses, ``one_s`` one of them. Linear in both."""
        if not self.waits:
            return NOTHING
        beside_s = (self.touched - 1) * self.expert_s + self.launch_s
        every = all_s - one_s * (self.ahead * (self.layers - self.first)) - self.layers * beside_s
        first = (all_s * (1 / self.layers) - beside_s) * (self.first * self.turns)
        return Price(late={Late.first: first * self.waits, Late.every: every * (self.waits * self.turns)})


def follows_itself(model: ModelSpec) -> float:
    """Of a rank's layers, the share that come behind another one of its own, as with unlike cards: its link is busy until they have their
    turn, and nothing comes ahead. 0 of slices, and of a whole model, whose link copies while it computes."""
    dealt = model.dealt
    if dealt is None or dealt.slices > 1:
        return 0.0
    own = [owner == dealt.rank for owner in dealt.owners]
    return sum(before and this for before, this in zip(own, own[1:], strict=False)) / max(1, sum(own))


def ahead_of(hardware: HardwareProfile, model: ModelSpec) -> float:
    """Experts that have come before a router has spoken, where the next layer's are known to be nearly all, as if the other links were
    idle; 0 without a card."""
    gpu, links = hardware.gpu, hardware.links
    if gpu is None or model.experts is None:
        return 0.0
    together = links.share(BESIDE, BESIDE * gpu.h2d.peak / links.held_to) if fetching_turns(model) > 1 else 1.0
    return (fewest_slots(model.experts) - 1) * (2 - 1 / together)

"""What the slots of the VRAM ring and of the DRAM cache give the first batch, and what a pass waits where FFN units have one slot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.planner.common.measures import GB
from penstock.planner.contract.bills.phase import Phase, units_computed
from penstock.planner.contract.decided.decisions import Decisions, Tier
from penstock.planner.contract.decided.placement import Placement, Unit, head_block_bytes, place
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.given.unit_spec import UnitKind
from penstock.planner.contract.policy import make_policy
from penstock.planner.contract.policy.turns import Turns
from penstock.planner.contract.prices.decoding import unit_s
from penstock.planner.contract.prices.price import Amount, Place, Resource, total
from penstock.planner.contract.prices.price_table import PriceTable


@dataclass(frozen=True)
class HeadStart:
    """Seconds that loading has saved the first pass: it need not wait for what lies in cache and ring. A pass behind another one finds its
    slots as full as it leaves them."""

    ssd_s: float
    """What a later pass reads and the first one does not. Negative where a rolling window is filled with less than it will keep."""
    h2d_s: float
    """Units that the ring has copied before compute begins."""


def head_start(hardware: HardwareProfile, model: ModelSpec, decisions: Decisions) -> HeadStart:
    """Of ``decisions`` once everything has loaded."""
    placement = place(model, decisions.weights, hardware.gpu is not None)
    saved_bytes = placement.ssd_bytes_per_pass - first_pass_bytes(placement)
    table = PriceTable.of(hardware, decisions)
    ahead = total(table.brought(placement.unit_bytes(unit), Tier.dram, Place.ring) for unit in _copied_first(placement))
    return HeadStart(table.brought(saved_bytes, Tier.ssd, Place.host).of(Resource.ssd), ahead.of(Resource.h2d))


def first_pass_bytes(placement: Placement) -> int:
    """Of weights that the first pass reads from the SSD: all that pass through DRAM but the cache's first fill."""
    held = set(make_policy(placement, wrap=True).preload())
    return sum(placement.layer_dram_bytes(layer) for layer in placement.dram_layers if layer not in held)


def _copied_first(placement: Placement) -> tuple[Unit, ...]:
    """The units that fit the ring and its window before compute asks for any."""
    counts = {name: count for name, (count, _) in placement.ring_classes.items()}
    units = placement.streamed_units[: sum(counts.values())]
    turns = Turns([unit.ring_class for unit in units], counts, placement.weights.vram.prefetch_distance)
    while units and turns.may_fetch():
        turns.fetched += 1
        number = turns.next_copy()
        if number is None:
            break
        turns.copy(number)
    return units[: turns.copied]


@dataclass(frozen=True)
class OneFfnSlot:
    """Seconds of a pass. The next FFN unit, or block of the LM head, is copied when the card is through with the one in the slot.

    Meanwhile the link brings the attention unit that comes between, where one streams, and the card computes its layer's attention:

        rests = F * c + H * b - min(A, F) * min(c, a)
        held = max(0, 2 * F - N) * (f - d)

    F, H and A: FFN units, blocks of the head and attention units that stream, of N layers. c, d, b: what the card takes for an FFN unit,
    for the rest of its layer, for a block. f, a: what the link takes for an FFN and for attention. Of units that are spread evenly 2 F - N
    have their forerunner in the layer before.
    """

    layers: int
    ffn_s: float
    block_s: float
    spared_s: float
    """Of ``ffn_s``, what a copy of attention fills."""
    held_s: float

    @classmethod
    def of(cls, hardware: HardwareProfile, model: ModelSpec, phase: Phase, head_blocks: int) -> OneFfnSlot:
        """Of a pass of ``phase`` on a card. Units of a kind are taken as equal."""
        assert hardware.gpu is not None
        units, link = model.of_kind(UnitKind.ffn), hardware.gpu.h2d.peak * GB
        multiplied_s = 2 * phase.rows * sum(unit.elements for unit in units) / hardware.dense_tflops / 1e12
        ffn_s = max(multiplied_s, sum(unit_s(hardware, unit, phase.rows) for unit in units)) / len(units)
        whole_s = phase.rest.of(Resource.card) / phase.passes + units_computed(hardware, model, head_blocks).of(Resource.card)
        return cls(
            layers=model.layers,
            ffn_s=ffn_s,
            block_s=head_block_bytes(model, head_blocks) / hardware.weight_gbps / GB,
            spared_s=min(ffn_s, model.attn_max / link),
            held_s=max(0.0, model.ffn_max / link - max(0.0, whole_s / model.layers - ffn_s)),
        )

    def rests(self, streamed: Mapping[UnitKind, Amount]) -> tuple[Amount, Amount]:
        """How long the link waits while so many units of each kind stream: the longer of these, or not at all."""
        ffn = streamed.get(UnitKind.ffn, 0)
        waiting = ffn * self.ffn_s + streamed.get(UnitKind.head, 0) * self.block_s
        return waiting - streamed.get(UnitKind.attn, 0) * self.spared_s, waiting - ffn * self.spared_s

    def held(self, streamed: Mapping[UnitKind, Amount]) -> Amount:
        """How long the card waits, though the link has time; not at all where that is less than 0."""
        return (streamed.get(UnitKind.ffn, 0) * 2 - self.layers) * self.held_s

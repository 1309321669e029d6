"""What lies in the DRAM cache and in the VRAM ring when the first pass begins: the first batch need not wait for it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.contract.decided.decisions import Decisions, Tier
from penstock.planner.contract.decided.placement import Placement, Unit, place
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.policy import make_policy
from penstock.planner.contract.policy.turns import Turns
from penstock.planner.contract.prices.price import Place, Resource, total
from penstock.planner.contract.prices.price_table import PriceTable


@dataclass(frozen=True)
class HeadStart:
    """Seconds that loading has saved the first pass. A pass behind another one finds its slots as full as it leaves them."""

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

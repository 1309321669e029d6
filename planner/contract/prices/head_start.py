"""What lies in the DRAM cache and in the VRAM ring when the first pass begins: the first batch need not wait for it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.common.measures import GB
from penstock.planner.contract.decided.decisions import Decisions
from penstock.planner.contract.decided.placement import Placement, Unit, place
from penstock.planner.contract.given.hardware import HardwareProfile
from penstock.planner.contract.given.model import ModelSpec
from penstock.planner.contract.policy import make_policy
from penstock.planner.contract.policy.turns import Turns
from penstock.planner.contract.prices.stages import h2d_gbps, ssd_gbps


@dataclass(frozen=True)
class HeadStart:
    """Seconds that loading has saved the first pass. A pass behind another one finds its slots as full as it leaves them."""

    ssd_s: float
    """What a later pass reads and the first one does not. Negative where a rolling window is filled with less than it will keep."""
    h2d_s: float
    """Units that the ring has copied before compute begins."""


def head_start(hardware: HardwareProfile, model: ModelSpec, decisions: Decisions) -> HeadStart:
    """Of ``decisions`` once everything has loaded."""
    gpu, weights = hardware.gpu, decisions.weights
    placement = place(model, weights, gpu is not None)
    saved_bytes = placement.ssd_bytes_per_pass - first_pass_bytes(placement)
    ssd_s = saved_bytes / GB / ssd_gbps(hardware, weights.ssd.block_bytes, weights.ssd.queue_depth)
    if gpu is None:
        return HeadStart(ssd_s, 0.0)
    sizes = (placement.unit_bytes(unit) for unit in _copied_first(placement))
    return HeadStart(ssd_s, sum(n / GB / h2d_gbps(gpu, n, weights.h2d.chunk_bytes) for n in sizes))


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

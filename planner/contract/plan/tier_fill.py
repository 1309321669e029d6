"""What a plan puts into each tier."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.planner.contract.decided.decisions import Tier
from penstock.planner.contract.plan.plan import Plan
from penstock.planner.contract.prices.memory_law import dram_use, ssd_in_place_bytes, ssd_use, vram_use


@dataclass(frozen=True)
class Fill:
    """One tier: its bytes and what takes them, the largest item first."""

    tier: Tier
    capacity_bytes: int
    items: dict[str, int]

    @property
    def taken_bytes(self) -> int:
        """What must be left free counts as taken."""
        return sum(self.items.values())

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.taken_bytes


def fills(plan: Plan) -> tuple[Fill, ...]:
    """The tiers that the machine has, from the fastest on. The SSD's capacity is what is free there and what the checkpoint takes. Of
    several ranks: VRAM of the fullest card, and what they take of DRAM and SSD together, on all hosts; each has the checkpoint."""
    h, ranks, hosts = plan.hardware, plan.each_rank, plan.hardware.hosts
    args = [(one.hardware, one.model, one.workload, one.decisions) for one in ranks]
    ssd_capacity = hosts * h.ssd_bytes + ssd_in_place_bytes(plan.model)
    tiers = [
        (Tier.dram, hosts * h.dram_bytes, _summed(dram_use(*a) for a in args)),
        (Tier.ssd, ssd_capacity, _summed(ssd_use(*a) for a in args)),
    ]
    if h.gpu:
        cards = [(one.hardware.vram_bytes, vram_use(*terms)) for one, terms in zip(ranks, args, strict=True)]
        tiers.insert(0, (Tier.vram, *max(cards, key=lambda card: sum(card[1].values()) / card[0])))
    return tuple(
        Fill(tier, capacity, {item: n for item, n in sorted(use.items(), key=lambda pair: -pair[1]) if n}) for tier, capacity, use in tiers
    )


def _summed(uses: Iterable[dict[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for use in uses:
        for item, nbytes in use.items():
            found[item] = found.get(item, 0) + nbytes
    return found

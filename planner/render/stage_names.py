"""What people call the resources that a phase waits for."""

from __future__ import annotations

from penstock.planner.contract.prices.price import Resource

STAGES = {
    Resource.ssd: "SSD read",
    Resource.dram: "DRAM bus",
    Resource.h2d: "H2D",
    Resource.d2h: "D2H",
    Resource.card: "compute",
    Resource.cpu: "compute",
}
"""What people call the resources. Today either the card or the CPU computes."""

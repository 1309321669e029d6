"""What people call the stages."""

from __future__ import annotations

from penstock.planner.contract.prices.stages import Stage

STAGES = {Stage.ssd: "SSD read", Stage.dram: "DRAM bus", Stage.h2d: "H2D", Stage.d2h: "D2H", Stage.compute: "compute"}
"""What people call them."""

"""What a plan takes of a machine's memory, and of how much."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.planner.contract.plan.plan import Plan


@dataclass(frozen=True)
class Budget:
    """Bytes of one run."""

    dram_bytes: int
    """All that the plan takes."""
    vram_bytes: int
    """All that the plan takes, its context included."""
    vram_limit_bytes: int
    """``hardware.vram_bytes``, which the allocator is held to."""
    context_bytes: int
    """Of the profile's GPU."""
    guard_bytes: int
    """``workload.vram_guard_bytes``."""
    gpu: str | None
    """Name of the profile's GPU; None where the CPU computes."""

    @classmethod
    def of(cls, plan: Plan) -> Budget:
        gpu, predicted = plan.hardware.gpu, plan.prediction
        limit, guard = plan.hardware.vram_bytes, plan.workload.vram_guard_bytes
        context, name = (0, None) if gpu is None else (gpu.context_bytes, gpu.name)
        return cls(predicted.dram_bytes, predicted.vram_bytes, limit, context, guard, name)

    @property
    def vram_beside_context_bytes(self) -> int:
        return self.vram_bytes - self.context_bytes

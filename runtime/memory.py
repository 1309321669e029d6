"""How much memory is free before a run, and how much it took at its peak."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from planner.errors import UserError
from planner.plan import Plan
from planner.probe.memory import memory_facts
from planner.units import show_bytes


class PeakDram:
    """Resident bytes of this process over what it had at the start: the kernel's own high-water mark."""

    def __init__(self) -> None:
        self._reset = True
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self._reset = False
        self.base_bytes = psutil.Process().memory_info().rss

    def peak_bytes(self) -> int:
        """Most bytes resident since the start, the interpreter's own left out."""
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return max(0, int(line.split()[1]) * 1024 - self.base_bytes)
        return max(0, psutil.Process().memory_info().rss - self.base_bytes)


def refuse_if_short(plan: Plan, device: torch.device) -> None:
    """UserError when the plan needs more memory than is free now."""
    need, free = plan.predicted.dram_bytes, memory_facts().plan_bytes
    if need > free:
        raise UserError(
            f"the plan takes {show_bytes(need)} of DRAM and {show_bytes(free)} is free; free some, or solve again with"
            f" hardware.dram_bytes={free}"
        )
    if device.type == "cuda":
        free_vram, total = torch.cuda.mem_get_info(device)
        budget = plan.hardware.vram_bytes
        if budget > total:
            raise UserError(
                f"hardware.vram_bytes={budget} is more than the card's {show_bytes(total)}; solve again with hardware.vram_bytes={total}"
            )
        context = plan.hardware.gpu.context_bytes if plan.hardware.gpu else 0
        if plan.predicted.vram_bytes - context > free_vram:
            raise UserError(
                f"the plan takes {show_bytes(plan.predicted.vram_bytes - context)} of VRAM beside its context and {show_bytes(free_vram)} is"
                f" free; end the other process or solve again with hardware.vram_bytes={free_vram}"
            )

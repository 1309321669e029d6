"""How much memory is free before a run, and how much it took at its peak."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch

from planner.errors import UserError
from planner.plan import Plan
from planner.probe.memory import memory_facts
from planner.units import show_bytes


class PeakDram:
    """Bytes that this process holds over what it held at the start, at their peak.

    The kernel's own high-water mark of resident bytes (reset at the start where it allows), less the file-backed pages that came
    since: libraries loaded on demand are the interpreter's, and the kernel drops them when memory is short.
    """

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        self._base = _status()

    def leave_out_cuda(self, arena_bytes: int) -> None:
        """What came since the start beside the arena is CUDA's own: kernels and libraries that the rehearsal loaded."""
        grown = _status()["RssAnon"] - self._base["RssAnon"] - arena_bytes
        self._base["VmRSS"] += max(0, grown)

    def peak_bytes(self) -> int:
        now = _status()
        return max(0, now["VmHWM"] - self._base["VmRSS"] - max(0, now["RssFile"] - self._base["RssFile"]))


def _status() -> dict[str, int]:
    """Sizes of /proc/self/status in bytes."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1] == "kB"}


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
                f"hardware.vram_bytes={budget} is more than the card's {show_bytes(total)}; solve with hardware.vram_bytes={total}"
            )
        context = plan.hardware.gpu.context_bytes if plan.hardware.gpu else 0
        if plan.predicted.vram_bytes - context > free_vram:
            raise UserError(
                f"the plan takes {show_bytes(plan.predicted.vram_bytes - context)} of VRAM beside its context and"
                f" {show_bytes(free_vram)} is free; end the other process or solve again with hardware.vram_bytes={free_vram}"
            )

"""The CUDA card of a run: opened with the allocator capped at the plan's budget, and what the run really took of it."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import show_bytes
from penstock.planner.common.outside.card_errors import FAILED_REMEDY, CardFailed, is_of_card, is_out_of_vram, said_by_card
from penstock.runtime.company.cards_here import shown_as
from penstock.runtime.company.nvml import ask_nvml, card_of_uuid, free_vram_of
from penstock.runtime.memory.budget import Budget
from penstock.runtime.memory.device import CudaDevice
from penstock.runtime.memory.free_memory import short_remedy

SPARE = 512 << 20
"""Bytes of VRAM that the allocator takes beyond the plan: holes between blocks of different sizes, and a context larger than planned."""
UNCHARGED = 64 << 20
"""Bytes of VRAM that the driver takes for a process and tells as nobody's: 34 to 50 MB on H100s beside what NVML says that it holds."""


def find_device(budget: Budget, number: int = 0) -> torch.device:
    """Where is computed: the GPU ``number``. UserError when that is a GPU and it is not there."""
    if budget.gpu is None:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError(f"the plan computes on a GPU ({budget.gpu}) and torch sees none here; solve again with hardware=cpu")
    if number == 0:
        return torch.device("cuda", 0)
    if number >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise UserError(f"the plan computes on GPU {number} and torch sees {count} here; solve again with hardware.devices= of those")
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def free_vram(device: torch.device) -> tuple[int, int]:
    """Bytes of the card that are free beside this process's context, which is made here, and all of them; zeros on the CPU."""
    return torch.cuda.mem_get_info(device) if device.type == "cuda" else (0, 0)


def open_cuda(budget: Budget, device: torch.device) -> CudaDevice | None:
    """The copy device, None on the CPU. Creates the context and cuBLAS first, so that their VRAM is known. Then caps the allocator: a run
    that would exceed the budget fails instead. Segments grow, because blocks of different sizes would waste each other's room."""
    if device.type != "cuda" or budget.gpu is None:
        return None
    with warnings.catch_warnings():  # the setter's name changes between torch versions
        warnings.simplefilter("ignore", FutureWarning)
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for every new length: 40 ms at each token of an 8B geometry
    small = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    small.matmul(small)  # creates cuBLAS's handle and workspace, which belong to the context's bytes
    torch.cuda.synchronize(device)
    total = torch.cuda.get_device_properties(device).total_memory
    # a process that has run before holds graphs and kernels of then: what a run leaves unplanned is the guard's
    grown = (context_bytes(device) or 0) - budget.guard_bytes
    room = budget.vram_limit_bytes - max(budget.context_bytes, grown)
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, room / total)), device)
    torch.cuda.reset_peak_memory_stats(device)
    return CudaDevice(device.index)


def take_planned(budget: Budget, device: torch.device) -> None:
    """Make torch's allocator ask the driver now for all VRAM of the plan, and for :data:`SPARE` besides where budget and card have it. A
    later request to the driver would wait for every copy in flight. First prompts of plans with room in their budget asked for 75 MB more,
    in three to five requests, and took 0.04 to 0.4 s longer than later ones: for that, it is inferred (docs/log.md, 2026-11-27)."""
    if device.type != "cuda" or budget.gpu is None:
        return
    context, reserved = max(budget.context_bytes, context_bytes(device) or 0), torch.cuda.memory_reserved(device)
    rest = missing_bytes(budget, context, reserved, torch.cuda.mem_get_info(device)[0])
    if rest > 0:
        torch.empty(rest, dtype=torch.uint8, device=device)  # dropped at once: the allocator keeps the segment
    torch.cuda.reset_peak_memory_stats(device)


def missing_bytes(budget: Budget, context: int, reserved: int, free: int) -> int:
    """What the allocator has not ``reserved`` yet of the plan's VRAM, its ``context`` left out, and what may be spared besides, of the
    card's ``free`` bytes. Never beyond the limit, and of the guard as much stays alone as the driver takes unseen."""
    taken = context + reserved + min(UNCHARGED, budget.guard_bytes)
    planned, most = (n - taken for n in (min(budget.vram_bytes, budget.vram_limit_bytes), budget.vram_limit_bytes))
    return max(planned, min(planned + SPARE, most, free - SPARE))


class VramWatch:
    """What a run takes of the card from its making, at the end of the warm-up, to its end. On the CPU there is nothing to watch."""

    def __init__(self, budget: Budget, device: torch.device):
        self._device = device if device.type == "cuda" and budget.gpu is not None else None
        self._planned_context = budget.context_bytes
        self._segments = self._device_allocations()

    def peak_bytes(self) -> int:
        """Peak bytes that the allocator handed out, plus the context as it is now; 0 on the CPU."""
        if self._device is None:
            return 0
        return torch.cuda.max_memory_allocated(self._device) + (context_bytes(self._device) or self._planned_context)

    def facts(self) -> dict[str, Any]:
        """For the report: peaks, the context against the plan's, and how often memory was asked of the driver since the warm-up."""
        if self._device is None:
            return {}
        context = context_bytes(self._device)
        return {
            "vram": {
                "allocated_bytes": torch.cuda.max_memory_allocated(self._device),
                "reserved_bytes": torch.cuda.max_memory_reserved(self._device),
                "context_bytes": self._planned_context if context is None else context,
                "context_measured": context is not None,
                "context_planned_bytes": self._planned_context,
            },
            "allocations_after_warmup": self._device_allocations() - self._segments,
        }

    def _device_allocations(self) -> int:
        return 0 if self._device is None else torch.cuda.memory_stats(self._device)["num_device_alloc"]


def context_bytes(device: torch.device) -> int | None:
    """VRAM that this process holds beside what torch's allocator reserved: the context, kernels loaded so far, libraries.

    None where NVML does not tell a process's share (some containers and drivers).
    """
    held = process_vram_bytes(str(torch.cuda.get_device_properties(device).uuid))
    return None if held is None else max(0, held - torch.cuda.memory_reserved(device))


def process_vram_bytes(uuid: str, nvml: Any = None) -> int | None:
    """VRAM that this process holds on the card ``uuid`` as NVML sees it; None where it does not say.

    A container's process ids are not the driver's: where no process is this one, the only one on the card is. ``nvml`` is the module
    ``pynvml``, imported when None.
    """
    running = ask_nvml(lambda nvml: nvml.nvmlDeviceGetComputeRunningProcesses(card_of_uuid(nvml, uuid)), nvml) or []
    mine = [p for p in running if p.pid == os.getpid()] or (running if len(running) == 1 else [])
    return mine[0].usedGpuMemory or None if mine else None


@contextmanager
def told_in_one_line(budget: Budget, device: torch.device, who: str = "") -> Iterator[None]:
    """Inside, whatever the card raises is a UserError of one line that names it. Of VRAM that runs out it says the budget, what the plan
    takes of it, and what is free now; of anything else, as CardFailed, in what words. ``who`` begins the line."""
    try:
        yield
    except RuntimeError as error:
        if is_out_of_vram(error):
            raise UserError(who + _shortage(budget, device, _wanted(error))) from error
        if is_of_card(error):
            raise CardFailed(f"{who}{_name(device)} failed ({said_by_card(error)}); {FAILED_REMEDY}") from error
        raise


def _name(device: torch.device) -> str:
    """As the machine numbers it, of which this process may see that one alone."""
    return f"GPU {shown_as(device.index or 0)}"


def _wanted(error: RuntimeError) -> str:
    """What was asked for in vain, in the words of who refused."""
    found = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    return f"another {found[1]}" if found else said_by_card(error)


def _shortage(budget: Budget, device: torch.device, wanted: str) -> str:
    taken = f"VRAM ran out: hardware.vram_bytes={budget.vram_limit_bytes}, of which the plan takes {show_bytes(budget.vram_bytes)}; "
    try:
        free, total = torch.cuda.mem_get_info(device)
        reserved = torch.cuda.memory_reserved(device)
    except RuntimeError:  # not even a context could be had, so torch cannot say how much is free
        left = free_vram_of(device.index or 0)
        has = "" if left is None else f" has {show_bytes(left)} free and"
        return f"{taken}{_name(device)}{has} refuses this process a context ({wanted}); {short_remedy(budget, left or 0)}"
    room = free + reserved + budget.context_bytes
    remedy = (
        short_remedy(budget, room)
        if room < budget.vram_bytes
        else f"solve again with workload.vram_guard_bytes={budget.guard_bytes + budget.vram_limit_bytes // 16}"
    )
    return (
        f"{taken}this process holds {show_bytes(reserved)} beside its context, was refused {wanted}, and {show_bytes(free)} of the card's"
        f" {show_bytes(total)} is free ({_name(device)}); {remedy}"
    )

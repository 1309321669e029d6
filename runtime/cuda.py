"""The CUDA card of a run: opened with the allocator capped at the plan's budget."""

from __future__ import annotations

import warnings

import torch

from planner.plan import Plan
from runtime.device import CudaDevice


def open_cuda(plan: Plan, device: torch.device) -> CudaDevice | None:
    """The copy device, None on the CPU. Creates the context and cuBLAS first, so that what they take is known, then caps the allocator:
    a run that would pass the budget fails instead. Segments that grow keep blocks of different sizes from wasting each other's room."""
    if device.type != "cuda" or plan.hardware.gpu is None:
        return None
    with warnings.catch_warnings():  # the setter's name changes between torch versions
        warnings.simplefilter("ignore", FutureWarning)
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
    small = torch.ones(64, 64, device=device, dtype=torch.bfloat16)
    small.matmul(small)
    torch.cuda.synchronize(device)
    total = torch.cuda.get_device_properties(device).total_memory
    room = plan.hardware.vram_bytes - plan.hardware.gpu.context_bytes
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, room / total)), device)
    torch.cuda.reset_peak_memory_stats(device)
    return CudaDevice(device.index)


def measured_vram_bytes(plan: Plan, device: torch.device) -> int:
    """Peak bytes that the allocator handed out, plus the context; 0 on the CPU."""
    if device.type != "cuda" or plan.hardware.gpu is None:
        return 0
    return torch.cuda.max_memory_allocated(device) + plan.hardware.gpu.context_bytes

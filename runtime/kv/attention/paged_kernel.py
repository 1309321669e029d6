"""Whether this machine has a kernel for attention over page tables."""

from __future__ import annotations

import importlib.util

import torch

from penstock.runtime.kv.attention.page_tables import PagedKernel


def open_kernel(device: torch.device) -> PagedKernel | None:
    """None on the CPU and where Triton is not installed: rows are then computed one after the other."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from penstock.runtime.kv.attention.paged_triton import TritonKernel

    return TritonKernel(torch.cuda.get_device_properties(device).multi_processor_count)

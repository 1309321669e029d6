"""Whether this machine has a kernel for attention over page tables."""

from __future__ import annotations

import importlib.util

import torch

from penstock.runtime.beside.host_pool import HostPool
from penstock.runtime.kv.attention.page_tables import PagedKernel
from penstock.runtime.kv.attention.paged_host import HostKernel


def open_kernel(device: torch.device, pool: HostPool | None = None) -> PagedKernel | None:
    """On the CPU that of ``pool``. None without one, and where Triton is not installed: rows are then computed one after the other, on the
    CPU to torch's bits."""
    if device.type == "cpu":
        return None if pool is None else HostKernel(pool)
    if importlib.util.find_spec("triton") is None:
        return None
    from penstock.runtime.kv.attention.paged_triton import TritonKernel

    return TritonKernel(torch.cuda.get_device_properties(device).multi_processor_count)

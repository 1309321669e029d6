"""How many compiled matrix kernels the CPU keeps."""

from __future__ import annotations

import os

from penstock.planner.contract.prices.sizes import OVERHEADS


def keep_few_kernels() -> None:
    """Limit the kernels that oneDNN and its PyTorch binding keep to what plans count, instead of 1024. Call before torch computes.

    Each shape of a product has a kernel of its own, which takes 0.2 ms to compile. A routed expert has another number of rows in every
    layer and prompt. 1000 row counts took 690 MB; with 32 kernels they take 95 MB. A user's own setting stays.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(OVERHEADS.cpu_kernels))

"""VRAM that is taken once: residents and ring slots in one allocation."""

from __future__ import annotations

import torch

from penstock.planner.common.measures import align_up

TENSOR_ALIGN = 256
"""Alignment of a tensor in VRAM: what matrix kernels need for their widest loads."""


class VramPool:
    """One block of VRAM handed out in 256-aligned regions; nothing is allocated after it."""

    def __init__(self, nbytes: int, device: torch.device):
        self.nbytes = nbytes
        self._block = torch.empty(max(nbytes, TENSOR_ALIGN), dtype=torch.uint8, device=device)
        self._used = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of ``nbytes``."""
        start = self._used
        self._used += align_up(nbytes, TENSOR_ALIGN)
        if self._used > self._block.numel():
            raise MemoryError(f"VRAM block of {self._block.numel()} bytes cannot give {nbytes} more after {start}")
        return self._block[start : start + nbytes]

    def close(self) -> None:
        """Give the block back, whoever still holds a view of it: views are of no use any more. Nothing may be under way that uses it."""
        give_back(self._block)


def give_back(tensor: torch.Tensor) -> None:
    """The memory of ``tensor`` is free, although views of it may live on: a model that a caller still has a name for, when it is closed,
    is no reason to hold gigabytes. Reading such a view is an error. Memory that numpy sees, on the CPU alone, goes with its last view."""
    storage = tensor.untyped_storage()
    if storage.resizable():
        storage.resize_(0)

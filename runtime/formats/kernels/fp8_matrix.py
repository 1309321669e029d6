"""A matrix in FP8 as kernels take it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Fp8Matrix:
    """The stored tensors of one matrix on a card: ``codes`` [rows, columns], uint8, and ``scales`` in F32, BF16 or F16."""

    codes: torch.Tensor
    scales: torch.Tensor
    tall: int
    """Rows that share a scale: 128 or 1; 0 is all of them."""
    wide: int
    """Columns that do: 128, or 0 for all."""

    @property
    def across(self) -> int:
        """Scales of one row of blocks."""
        return -(-self.codes.shape[1] // self.wide) if self.wide else 1

"""A matrix of numbers of 4 bits as kernels take it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True)
class E2m1Matrix:
    """The stored tensors of one matrix on a card, which stay where they are; what is asked again and again is kept.

    ``factors`` F32, one for each of the matrices that are joined by their rows, or None."""

    codes: torch.Tensor
    scales: torch.Tensor
    factors: torch.Tensor | None = None
    divides: bool = False
    """Whether scales are divided by the factors."""
    bias: torch.Tensor | None = None

    @cached_property
    def group(self) -> int:
        """Columns that share a scale: E8M0 32, E4M3 16."""
        return 2 * self.codes.numel() // self.scales.numel()

    @property
    def bytes_of_scales(self) -> torch.Tensor:
        return self.scales.view(torch.uint8)

    @cached_property
    def begin(self) -> int:
        """Where the codes lie."""
        return self.codes.data_ptr()

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Where scales, bias and factors begin, in bytes from the codes on; 0 for what is not there."""
        return tuple(0 if t is None else t.data_ptr() - self.begin for t in (self.scales, self.bias, self.factors))

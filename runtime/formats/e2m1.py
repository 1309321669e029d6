"""The numbers of 4 bits that MXFP4 and NVFP4 are made of: a sign, two bits of exponent, one of mantissa; two of them a byte."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache

import torch

from penstock.runtime.formats.coding import Parts
from penstock.runtime.formats.kernels.e2m1_matrix import E2m1Matrix
from penstock.runtime.formats.kernels.on_card import e2m1_kernels
from penstock.runtime.formats.native.nibbles import decode_nibbles

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""By code (OCP Microscaling 1.0, table 5.3.3)."""
_AT_ONCE = 1 << 20
"""Bytes of codes that are decoded at a time, which bounds what is held beside the result."""


class E2m1Coding(ABC):
    """What both formats share: kernels on a card, whatever lies around the numbers."""

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        kernels = e2m1_kernels(out.device)
        if kernels is None:
            self.decode_here(parts, out)
        else:
            kernels.decode(self.on_card(parts, None), out)

    def linear(self, x: torch.Tensor, parts: Parts, bias: torch.Tensor | None) -> torch.Tensor | None:
        kernels = e2m1_kernels(x.device)
        return None if kernels is None else kernels.linear(x, self.on_card(parts, bias))

    def grouped(self, parts: Parts, bias: torch.Tensor | None) -> E2m1Matrix:
        return self.on_card(parts, bias)

    def experts(self, x: torch.Tensor, matrices: Sequence[E2m1Matrix]) -> torch.Tensor | None:
        kernels = e2m1_kernels(x.device)
        return None if kernels is None else kernels.experts(x, matrices)

    def tabled(self, x: torch.Tensor, matrix: E2m1Matrix, table: torch.Tensor) -> torch.Tensor | None:
        kernels = e2m1_kernels(x.device)
        return None if kernels is None else kernels.tabled(x, matrix, table)

    @abstractmethod
    def decode_here(self, parts: Parts, out: torch.Tensor) -> None:
        """Without kernels."""

    @abstractmethod
    def on_card(self, parts: Parts, bias: torch.Tensor | None) -> E2m1Matrix:
        """As kernels take it."""


def unpack(packed: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> None:
    """Decode ``packed`` uint8, two numbers a byte, the lower half first, and multiply each run of numbers that share a factor by it.

    ``factors`` F32, in row-major order. ``out`` [rows, columns], contiguous, gets each product rounded once. Memory: 12 MiB, or in C that
    of the factors.
    """
    if decode_nibbles(packed, _values(), factors, out):
        return
    flat = factors.reshape(-1, 1)
    groups = out.view(len(flat), -1)
    codes, exact = packed.reshape(len(flat), -1), _factors_fit(out.dtype, factors)
    pairs = _pairs(out.dtype if exact else torch.float32, out.device)
    step = max(1, _AT_ONCE // codes.shape[1])
    for first in range(0, len(flat), step):
        numbers = torch.index_select(pairs, 0, codes[first : first + step].int().view(-1))
        numbers = numbers.view(out.dtype if exact else torch.float32).view(-1, groups.shape[1])
        if exact:
            torch.mul(numbers, flat[first : first + step].to(out.dtype), out=groups[first : first + step])
        else:
            groups[first : first + step] = numbers.mul_(flat[first : first + step])


def _factors_fit(dtype: torch.dtype, factors: torch.Tensor) -> bool:
    """Whether ``dtype`` holds each factor as it is, so that products need no F32 between."""
    return dtype is torch.float32 or (dtype is torch.bfloat16 and factors.dtype is torch.bfloat16)


@cache
def _values() -> torch.Tensor:
    return torch.tensor(VALUES)


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256]: the two numbers of every byte, as one number of twice their width."""
    code = torch.arange(256)
    values = torch.tensor(VALUES, dtype=dtype)
    both = torch.stack([values[code & 15], values[code >> 4]], dim=1)
    return both.view(torch.int64 if dtype.itemsize == 4 else torch.int32).squeeze(1).to(device)

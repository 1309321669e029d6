"""How a token's K and V lie in the buffer of one layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Pair = tuple[torch.Tensor, torch.Tensor]
"""K and V."""
Heads = tuple[int, int]
"""Heads, and the dimension of each."""


@dataclass(frozen=True)
class TokenShape:
    """K of all heads, then V of all heads, token after token: any run of adjacent pages is one contiguous piece of memory."""

    keys: Heads
    values: Heads
    dtype: torch.dtype

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> TokenShape:
        """For states [1, heads, tokens, dim]."""
        return cls((keys.shape[1], keys.shape[3]), (values.shape[1], values.shape[3]), keys.dtype)

    @property
    def nbytes(self) -> int:
        """Of one token."""
        return self._elements * self.dtype.itemsize

    @property
    def _elements(self) -> int:
        return self.keys[0] * self.keys[1] + self.values[0] * self.values[1]

    def pair(self, buffer: torch.Tensor) -> Pair:
        """K and V [tokens, heads, dim], sharing memory with ``buffer`` (uint8): as many tokens as it holds."""
        flat = buffer.view(self.dtype)
        tokens, start = flat.numel() // self._elements, flat.storage_offset()
        (h, d), (g, e) = self.keys, self.values
        keys = flat.as_strided((tokens, h, d), (self._elements, d, 1), start)
        return keys, flat.as_strided((tokens, g, e), (self._elements, e, 1), start + h * d)

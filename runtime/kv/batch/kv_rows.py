"""Where tokens' K and V lie in memory that streams: token after token, so that any stretch of a sequence is one contiguous piece."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from penstock.runtime.kv.batch.kv_block import Pair


@dataclass(frozen=True)
class Rows:
    """One row a token: K of the whole batch, [batch, heads, dim], then V. ``keys`` and ``values`` are these shapes."""

    keys: tuple[int, int, int]
    values: tuple[int, int, int]
    dtype: torch.dtype

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> Rows:
        """For states of [batch, heads, tokens, dim]."""
        (b, h, _, d), (_, g, _, e) = keys.shape, values.shape
        return cls((b, h, d), (b, g, e), keys.dtype)

    def for_batch(self, batch: int) -> Rows:
        """The same for another number of sequences."""
        return replace(self, keys=(batch, *self.keys[1:]), values=(batch, *self.values[1:]))

    @property
    def nbytes(self) -> int:
        """Of one row."""
        return self._elements * self.dtype.itemsize

    @property
    def _elements(self) -> int:
        return _product(self.keys) + _product(self.values)

    def pair(self, buffer: torch.Tensor, tokens: int) -> Pair:
        """K and V, [batch, heads, tokens, dim], sharing memory with ``buffer`` (uint8), whose first row is token 0."""
        flat = buffer[: tokens * self.nbytes].view(self.dtype)
        return tuple(
            flat.as_strided((b, h, tokens, d), (h * d, d, self._elements, 1), flat.storage_offset() + start)
            for (b, h, d), start in ((self.keys, 0), (self.values, _product(self.keys)))
        )

    def append(self, buffer: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> Pair:
        """Write states [batch, heads, tokens, dim] behind the first ``start`` rows of ``buffer`` -> K and V of all rows so far."""
        pair = self.pair(buffer, start + keys.shape[-2])
        for held, states in zip(pair, (keys, values), strict=True):
            held[:, :, start:] = states
        return pair


def _product(shape: tuple[int, int, int]) -> int:
    batch, heads, dim = shape
    return batch * heads * dim

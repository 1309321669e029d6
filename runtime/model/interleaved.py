"""Matrices of queries or keys whose rows lie as llama.cpp rotates them: of each head, rows of its two halves in turn."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.runtime.formats.coding import Coding, Parts


@dataclass(frozen=True)
class Interleaved:
    """``coding`` of such a matrix with ``heads`` heads, all of whose leaves have a row for each of its rows.

    Decoding moves rows as they are stored, then decodes them: the bits are those of a matrix in order. Takes the stored bytes once more.
    """

    coding: Coding
    heads: int

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        self.coding.decode({leaf: self._in_order(tensor) for leaf, tensor in parts.items()}, out)

    def linear(self, x: torch.Tensor, parts: Parts, bias: torch.Tensor | None) -> torch.Tensor | None:
        made = self.coding.linear(x, parts, None)
        if made is None:
            return None
        ordered = made.unflatten(1, (self.heads, -1, 2)).transpose(2, 3).reshape(made.shape)
        return ordered if bias is None else ordered + bias

    def _in_order(self, rows: torch.Tensor) -> torch.Tensor:
        """[rows, ...], each head's first half before its second."""
        return rows.unflatten(0, (self.heads, -1, 2)).transpose(1, 2).reshape(rows.shape)

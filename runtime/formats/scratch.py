"""Memory that matrices are decoded into, one after the other."""

from __future__ import annotations

import torch


class Scratch:
    """One buffer for the largest matrix of a model: whoever decodes into it multiplies before the next one decodes.

    It is taken with the first matrix, on that one's device, which a rehearsal brings; an engine takes no memory after that. The products
    of a model follow each other, on a card in one stream.
    """

    def __init__(self, elements: int):
        self.elements = elements
        self._buffer = torch.empty(0)

    def of(self, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """[rows, columns], contiguous, with whatever lay there. ValueError for more elements than there is room for."""
        if rows * columns > self.elements:
            raise ValueError(f"a matrix of {rows} x {columns} in a scratch of {self.elements} elements")
        if self._buffer.dtype != dtype or self._buffer.device != device or not len(self._buffer):
            with torch.inference_mode(False):
                self._buffer = torch.empty(self.elements, dtype=dtype, device=device)
        return self._buffer[: rows * columns].view(rows, columns)

    def leave(self) -> torch.Tensor:
        """Its memory, for whoever gives that back; a matrix that is decoded later has memory taken anew."""
        left, self._buffer = self._buffer, torch.empty(0)
        return left

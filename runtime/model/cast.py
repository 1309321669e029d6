"""Weights that are stored in one float type and computed with in another: brought as stored, converted where they lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from penstock.planner.common.measures import align_up
from penstock.runtime.reading.layout import TensorLayout, UnitLayout

STRETCH = 1 << 20
"""Elements that are converted at once: what a conversion takes beside the buffer."""


@dataclass(frozen=True)
class Cast:
    """To ``wanted``, of all tensors of a layout; each has room for the wider of both types from its offset on."""

    wanted: torch.dtype

    def as_bound(self, tensors: Sequence[TensorLayout]) -> tuple[TensorLayout, ...]:
        """``tensors`` once they are converted."""
        size = self.wanted.itemsize
        return tuple(replace(t, dtype=self.wanted, nbytes=t.nbytes // t.dtype.itemsize * size) for t in tensors)

    def roomy(self, layout: UnitLayout) -> UnitLayout:
        """``layout`` of one tensor, with room behind it for the wider type, its offset a multiple of that type's size."""
        (tensor,) = layout.tensors
        (bound,) = self.as_bound(layout.tensors)
        if tensor.offset % self.wanted.itemsize:
            extents = tuple(replace(e, dest=e.dest - tensor.offset, owns_pages=False) for e in layout.extents)
            tensor, layout = replace(tensor, offset=0), replace(layout, extents=extents)
        nbytes = max(layout.nbytes, align_up(tensor.offset + bound.nbytes))
        return replace(layout, tensors=(tensor,), nbytes=nbytes)

    def convert(self, tensors: Sequence[TensorLayout], buffer: torch.Tensor) -> None:
        """In ``buffer`` (uint8), rounded as ``torch`` rounds. Takes ``STRETCH`` elements beside it."""
        for tensor, bound in zip(tensors, self.as_bound(tensors), strict=True):
            source = buffer[tensor.offset : tensor.offset + tensor.nbytes].view(tensor.dtype)
            target = buffer[bound.offset : bound.offset + bound.nbytes].view(bound.dtype)
            starts = range(0, len(source), STRETCH)
            for start in starts if bound.nbytes <= tensor.nbytes else reversed(starts):  # what is overwritten was read before
                target[start : start + STRETCH] = source[start : start + STRETCH].clone()

"""Page-aligned DRAM for one page each, seen as bytes by the disk and as tensors by the KV buffers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from planner.errors import UserError
from runtime.kv.contiguous import Pair
from runtime.kv.record import PageShape
from runtime.kv.segments import aligned


class Staging:
    """DRAM: one page. UserError when the model's KV, of which ``pairs`` are all layers', is not of ``shape``."""

    def __init__(self, shape: PageShape, pairs: Sequence[Pair]):
        self.view = aligned(shape.payload_bytes)
        self._tokens = shape.page_tokens
        flat = torch.frombuffer(self.view, dtype=torch.uint8)
        self._blocks: list[tuple[torch.Tensor, torch.Tensor]] = []
        at = 0
        for pair in pairs:
            blocks = []
            for held in pair:
                heads, dim = held.shape[1], held.shape[3]
                nbytes = heads * self._tokens * dim * held.element_size()
                if at + nbytes > len(flat):
                    raise _other_shape(shape)
                blocks.append(flat[at : at + nbytes].view(held.dtype).view(heads, self._tokens, dim))
                at += nbytes
            if at != len(self._blocks) * shape.layer_bytes + shape.layer_bytes:
                raise _other_shape(shape)
            self._blocks.append(tuple(blocks))
        if at != shape.payload_bytes:
            raise _other_shape(shape)

    def store(self, pairs: Sequence[Pair], sequence: int, row: int) -> None:
        """Write the page to ``row`` and the following ones of ``sequence``; ordered with what the device computes."""
        for pair, blocks in zip(pairs, self._blocks, strict=True):
            for held, block in zip(pair, blocks, strict=True):
                held[sequence, :, row : row + self._tokens].copy_(block)

    def load(self, pairs: Sequence[Pair], sequence: int, row: int) -> None:
        """Copy ``row`` and the following ones of ``sequence`` here. Waits for what the device computes."""
        for pair, blocks in zip(pairs, self._blocks, strict=True):
            for held, block in zip(pair, blocks, strict=True):
                block.copy_(held[sequence, :, row : row + self._tokens])


def _other_shape(shape: PageShape) -> UserError:
    return UserError(
        f"kv.dir: the model's KV is not {shape.layers} layers of {shape.layer_bytes} bytes for {shape.page_tokens} tokens, "
        "as its geometry says; leave kv.dir out"
    )

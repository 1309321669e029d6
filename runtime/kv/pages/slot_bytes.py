"""The bytes that one slot of the pool has in all layers, and the record that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import numpy as np
import torch

from penstock.planner.common.errors import UserError
from penstock.runtime.kv.disk.page_record import PageShape


class SlotBytes:
    """Slots of ``buffers``, the pool's uint8 memory by layer, as records of ``shape``: layer after layer. ``on_card`` tells which
    buffers lie in the card's memory, the others are in DRAM.

    A record's part for the card is packed: the card's layers one after the other. One kernel moves it, where these layers lie at equal
    distances in one allocation. UserError when the pool's pages are not of ``shape``.
    """

    def __init__(self, shape: PageShape, buffers: Mapping[int, torch.Tensor], on_card: Callable[[torch.Tensor], bool]):
        layers = sorted(buffers)
        slots = {held.numel() // shape.layer_bytes for held in buffers.values()}
        if len(layers) != shape.layers or len(slots) != 1 or any(held.numel() % shape.layer_bytes for held in buffers.values()):
            raise UserError(
                f"kv.dir: the model's KV is not {shape.layers} layers of {shape.layer_bytes} bytes for {shape.page_tokens} tokens, "
                "as its geometry says; leave kv.dir out"
            )
        paged = [buffers[layer].view(torch.int64).view(*slots, -1) for layer in layers]
        card = [i for i, layer in enumerate(layers) if on_card(buffers[layer])]
        self._on_card = _together([paged[i] for i in card])
        self._on_host = [(i, paged[i]) for i in range(len(layers)) if i not in card]
        self._layer_bytes = shape.layer_bytes
        self.card_bytes = len(card) * shape.layer_bytes
        self.card_ranges = [(k * shape.layer_bytes, i * shape.layer_bytes, shape.layer_bytes) for k, i in enumerate(card)]
        """(where in the packed part, where in a record, bytes), neighbours made one."""
        self.card_ranges = _merged(self.card_ranges)

    @property
    def any_on_host(self) -> bool:
        """Whether some layers lie in DRAM."""
        return bool(self._on_host)

    def fill(self, slot: int, packed: torch.Tensor) -> None:
        """Write the card's part of a record, uint8 on the card, to ``slot``: kernels for the compute stream."""
        for held, part in self._parts(packed):
            held[:, slot].copy_(part)

    def pack(self, slot: int, packed: torch.Tensor) -> None:
        """The same in the other direction."""
        for held, part in self._parts(packed):
            part.copy_(held[:, slot])

    def fill_host(self, slot: int, record: torch.Tensor) -> None:
        """Write what of a record, uint8 in DRAM, belongs in DRAM to ``slot``."""
        for i, held in self._on_host:
            held[slot].copy_(self._of(record, i))

    def pack_host(self, slot: int, record: torch.Tensor) -> None:
        """The same in the other direction, by the calling thread alone: torch's own copy takes every core, which others compute with."""
        for i, held in self._on_host:
            np.copyto(self._of(record, i).numpy(), held[slot].numpy())

    def _of(self, record: torch.Tensor, layer: int) -> torch.Tensor:
        return record[layer * self._layer_bytes : (layer + 1) * self._layer_bytes].view(torch.int64)

    def _parts(self, packed: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        words = packed[: self.card_bytes].view(torch.int64).view(-1, self._layer_bytes // 8)
        parts = words.split([len(held) for held in self._on_card])
        return list(zip(self._on_card, parts, strict=True))


def _together(buffers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``buffers`` [slots, words] as one [layers, slots, words] where they lie at equal distances in one allocation, else each alone."""
    distances = {b.storage_offset() - a.storage_offset() for a, b in pairwise(buffers)}
    storages = {held.untyped_storage().data_ptr() for held in buffers}
    if len(storages) == 1 and len(distances) <= 1 and min(distances, default=1) > 0:
        first = buffers[0]
        strides = (min(distances, default=0), *first.stride())
        return [first.as_strided((len(buffers), *first.shape), strides, first.storage_offset())]
    return [held[None] for held in buffers]


def _merged(ranges: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    out: list[tuple[int, int, int]] = []
    for at, start, nbytes in ranges:
        if out and out[-1][1] + out[-1][2] == start:
            before = out.pop()
            at, start, nbytes = before[0], before[1], before[2] + nbytes
        out.append((at, start, nbytes))
    return out

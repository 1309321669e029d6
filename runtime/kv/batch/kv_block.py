"""One allocation for the KV of equal layers."""

from __future__ import annotations

import torch

Pair = tuple[torch.Tensor, torch.Tensor]


class KvBlock:
    """KV of ``layers`` layers of one kind, [layers, 2, batch, kv_heads, capacity, head_dim]: what is copied to or from all of them lies at
    equal distances. Taken when the first one asks; one that is unlike it, or whose K and V differ, takes memory of its own."""

    def __init__(self, layers: int, capacity: int):
        self._layers, self._capacity = layers, capacity
        self._held: torch.Tensor | None = None

    def take(self, i: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """K and V of the ``i``-th layer, [batch, kv_heads, capacity, head_dim] each, for at least as many sequences as such states have."""
        shapes = [(len(s), s.shape[1], self._capacity, s.shape[3]) for s in (keys, values)]
        if shapes[0] == shapes[1]:
            if self._held is None or self._held.shape[2] < len(keys):
                self._held = keys.new_empty(self._layers, 2, *shapes[0])
            if self._held.shape[3:] == shapes[0][1:] and self._held.dtype == keys.dtype:
                return self._held[i, 0], self._held[i, 1]
        return tuple(s.new_empty(shape) for s, shape in zip((keys, values), shapes, strict=True))

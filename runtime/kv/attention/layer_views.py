"""One layer's buffer as the views that attention takes: made by as few calls as there can be, since a resident step waits for the host."""

from __future__ import annotations

import torch

from penstock.runtime.kv.attention.row_groups import Rect
from penstock.runtime.kv.batch.token_shape import Pair, TokenShape


class LayerViews:
    """K and V of a layer whose tokens have ``shape``, in whatever buffer it lies."""

    def __init__(self, shape: TokenShape):
        self.shape = shape
        self._pairs: dict[int, Pair] = {}

    def pair(self, buffer: torch.Tensor) -> Pair:
        """K and V [pool tokens, heads, dim] of ``buffer``, made once for each place."""
        address = buffer.data_ptr()
        if address not in self._pairs:
            self._pairs[address] = self.shape.pair(buffer)
        return self._pairs[address]


def write(states: torch.Tensor, rect: Rect, new: torch.Tensor) -> None:
    """New K or V [1, heads, tokens of all rows, dim] to its places in ``states`` [pool tokens, heads, dim]."""
    token, head, dim = states.stride()
    at = states.storage_offset() + (rect.base + rect.start) * token
    if rect.rows == 1:
        states.as_strided(new.shape, (0, head, token, dim), at).copy_(new)
        return
    size = (new.shape[1], rect.rows, rect.tokens, new.shape[3])
    states.as_strided(size, (head, rect.stride * token, token, dim), at).copy_(new.view(size))


def seen(states: torch.Tensor, rect: Rect, first: int) -> torch.Tensor:
    """K or V [rows, heads, tokens, dim] of ``rect`` from each row's token ``first`` to its end."""
    token, head, dim = states.stride()
    size, at = (rect.rows, states.shape[1], rect.end - first, states.shape[2]), states.storage_offset() + (rect.base + first) * token
    return states.as_strided(size, (rect.stride * token, head, token, dim), at)

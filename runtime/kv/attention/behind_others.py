"""Attention of several tokens behind others, each of which sees those before it, by FlashAttention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.bias import causal_lower_right

_EVEN = 8
"""Elements of a head, a multiple of which FlashAttention takes."""
_Kind = tuple[torch.Size, torch.Size, torch.Size, torch.dtype]


class BehindOthers:
    """Of one part of a pass. For a bias that sees the lower right, torch finds out by its Python whether FlashAttention can be used, at
    each call, and then calls what is called here: what it finds out for one layer holds for all that are alike."""

    def __init__(self) -> None:
        self._flash: dict[_Kind, bool] = {}

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None) -> torch.Tensor:
        """[rows, heads, tokens, dim] each, of which K and V have fewer heads or as many -> [rows, heads, tokens, dim of V]."""
        kind = query.shape, key.shape, value.shape, query.dtype
        flash = self._flash.get(kind)
        if flash is None:
            flash = self._flash[kind] = scale is not None and query.shape[3] % _EVEN == 0 and _usable(query, key, value)
        if flash:
            flash_attention = torch.ops.aten._scaled_dot_product_flash_attention.default
            out: torch.Tensor = flash_attention(query, key, value, 0.0, True, False, scale=scale)[0]
            return out
        bias, grouped = causal_lower_right(query.shape[2], key.shape[2]), query.shape[1] != key.shape[1]
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scale, enable_gqa=grouped)


def _usable(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """As torch asks it."""
    return bool(can_use_flash_attention(SDPAParams(query, key, value, None, 0.0, False, query.shape[1] != key.shape[1])))

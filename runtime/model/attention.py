"""Attention of several tokens behind those in the KV cache, on a card: FlashAttention, where `transformers` would build a mask, repeat K
and V over the query heads and take a kernel that knows nothing of causality."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

NAME = "penstock_sdpa"
_MOST_DIM = 256
"""Of a head, that FlashAttention takes."""


@dataclass(frozen=True)
class AttentionWithoutMasks:
    """Has a model attend so on ``device``."""

    device: torch.device

    def convert(self, model: PreTrainedModel) -> None:
        attend_without_masks(model, self.device)


def attend_without_masks(model: PreTrainedModel, device: torch.device) -> None:
    """Have ``model`` attend so on ``device``, where FlashAttention is to be had and the model would use SDPA; else nothing."""
    config = model.config.get_text_config(decoder=True)
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    flash = device.type == "cuda" and model.dtype in (torch.bfloat16, torch.float16) and dim <= _MOST_DIM
    if flash and config._attn_implementation == "sdpa":
        use(model)


def use(model: PreTrainedModel) -> None:
    """Register the two functions and have ``model`` call them."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, mask)
    model.set_attn_implementation(NAME)


def mask(*args: Any, **kwargs: Any) -> torch.Tensor | None:
    """``sdpa_mask``, but None for every plain causal one, not only where queries are as many as keys."""
    plain = kwargs.get("mask_function") is causal_mask_function and kwargs.get("attention_mask") is None
    return None if plain and kwargs.get("allow_is_causal_skip", True) else sdpa_mask(*args, **kwargs)


def attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None, **kwargs: Any
) -> tuple[torch.Tensor, None]:
    """``sdpa_attention_forward``, but for [batch, heads, tokens, dim] queries that are the last of more keys and have no mask."""
    queries, keys = query.shape[2], key.shape[2]
    if attention_mask is not None or not 1 < queries < keys:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    bias = causal_lower_right(queries, keys)
    grouped = query.shape[1] != key.shape[1]
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=kwargs.get("scaling"), enable_gqa=grouped)
    return out.transpose(1, 2).contiguous(), None

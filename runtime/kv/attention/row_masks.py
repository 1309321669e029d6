"""Masks as `transformers` would make them for a row alone: what a model asks for is noted, and made when a row needs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function

MaskFunction = Callable[..., torch.Tensor | None]


@dataclass(frozen=True, eq=False)
class MaskRequest:
    """What a model passes to its mask function, in place of the mask itself. One for each kind of layer in each pass."""

    asked: Mapping[str, Any]

    def for_row(self, make: MaskFunction, tokens: int, start: int, first: int) -> torch.Tensor | None:
        """The mask of ``tokens`` behind ``start`` others, of which attention sees those from ``first`` on: [1, 1, tokens, keys] or None."""
        sizes = {"batch_size": 1, "q_length": tokens, "kv_length": start + tokens - first, "q_offset": start, "kv_offset": first}
        return make(**{**self.asked, **sizes})

    @cached_property
    def is_causal(self) -> bool:
        """Whether every token sees itself and all before it."""
        return self.asked.get("mask_function") is causal_mask_function and self._is_simple

    @cached_property
    def is_window(self) -> bool:
        """Whether every token sees itself and all before it in a window."""
        return self.asked.get("local_size") is not None and self._is_simple

    @property
    def _is_simple(self) -> bool:
        return self.asked.get("attention_mask") is None and bool(self.asked.get("allow_is_causal_skip", True))


def request_mask(**asked: Any) -> MaskRequest:
    """What models call to make a mask, registered under our name."""
    return MaskRequest(asked)

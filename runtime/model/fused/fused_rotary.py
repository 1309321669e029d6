"""Rotary positions of queries and keys by a kernel of our own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from transformers import PreTrainedModel

from penstock.runtime.formats.kernels.on_card import layer_kernels
from penstock.runtime.model.fused.direct import Attending, Bare
from penstock.runtime.model.fused.known_code import children_called, reads_as, undecorated

_NAME = "apply_rotary_pos_emb"
_FUNCTIONS = "ALL_ATTENTION_FUNCTIONS"
_ROTARY = """
def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed
"""
_HALF = """
def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)
"""
Rotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class FusedRotary:
    """For attention whose module rotates as Llama's does. Its own code runs on, with another function in that one's place. Where that does
    nothing with the module's children but call them, it runs without what torch does around each of these calls."""

    def convert(self, model: PreTrainedModel) -> None:
        for module in model.modules():
            forward, home = undecorated(type(module).forward), sys.modules[type(module).__module__]
            own, half = getattr(home, _NAME, None), getattr(home, "rotate_half", None)
            taken = "forward" in vars(module) or not isinstance(forward, FunctionType)
            if own is None or half is None or taken or _NAME not in forward.__code__.co_names:
                continue
            if forward.__closure__ is None and reads_as(own, _ROTARY) and reads_as(half, _HALF):
                module.forward = _other(module, forward, {_NAME: partial(_rotated, own)})


def _other(module: Any, forward: Any, functions: dict[str, Any]) -> Callable[..., Any]:
    """``forward`` of ``module``, with other ``functions`` by their names."""
    called, runs = children_called(forward), module
    if called is not None and called >= module._modules.keys():
        functions |= {_FUNCTIONS: Attending(forward.__globals__[_FUNCTIONS], module)}
        runs = Bare(module)
    other = FunctionType(forward.__code__, {**forward.__globals__, **functions}, forward.__name__)
    other.__defaults__, other.__kwdefaults__ = forward.__defaults__, forward.__kwdefaults__
    return partial(other, runs)


def _rotated(own: Rotary, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **named: Any) -> Any:
    kernels, made = layer_kernels(q.device), None
    if kernels is not None and not more and not named:
        made = kernels.rotate(q, k, cos, sin)
    return own(q, k, cos, sin, *more, **named) if made is None else made

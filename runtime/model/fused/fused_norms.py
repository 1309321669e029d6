"""Root mean square norms, and the sum before them, by a kernel of our own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from penstock.planner.common.outside.cache_name import NEW, OLD
from penstock.runtime.formats.kernels.on_card import layer_kernels
from penstock.runtime.formats.stored_linear import StoredLinear
from penstock.runtime.model.fused.direct import called
from penstock.runtime.model.fused.known_code import computes_as

_NORM = """
def forward(self, hidden_states):
    input_dtype = hidden_states.dtype
    hidden_states = hidden_states.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    hidden_states = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
    return self.weight * hidden_states.to(input_dtype)
"""
_LAYER = """
def forward(self, hidden_states, {first}=None, position_ids=None, {cache}=None, {last}**kwargs):
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    hidden_states, _ = self.self_attn(hidden_states=hidden_states, {given}, **kwargs)
    hidden_states = residual + hidden_states
    residual = hidden_states
    hidden_states = self.post_attention_layernorm(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = residual + hidden_states
    return hidden_states
"""
_LAYERS = tuple(
    _LAYER.format(first=first, cache=cache, last=last, given=given.format(cache=cache))
    for cache in (OLD, NEW)
    for first, last, given in (
        (
            "attention_mask",
            "use_cache=False, position_embeddings=None, ",
            "attention_mask=attention_mask, position_ids=position_ids, {cache}={cache}, use_cache=use_cache, "
            "position_embeddings=position_embeddings",
        ),
        (
            "position_embeddings=None, attention_mask",
            "",
            "position_embeddings=position_embeddings, attention_mask=attention_mask, position_ids=position_ids, {cache}={cache}",
        ),
    )
)


class FusedNorms:
    """For norms and decoder layers whose code is Llama's: to the bits that torch gives, in one kernel where it sums as torch does, else in
    three. Where products read a stored form, in one whose sum has an order of its own: those are within rounding of the model's, and no
    more can be asked of what lies between."""

    def convert(self, model: PreTrainedModel) -> None:
        norms = [module for module in model.modules() if computes_as(module, _NORM)]
        exact = not any(isinstance(module, StoredLinear) and module.form.product_rows for module in model.modules())
        for norm in norms:
            norm.forward = partial(_normed, norm, exact)
        for layer in model.modules():
            if getattr(layer, "post_attention_layernorm", None) in norms and any(computes_as(layer, text) for text in _LAYERS):
                layer.forward = partial(_layer, layer)


def _normed(norm: Any, exact: bool, hidden_states: torch.Tensor, more: torch.Tensor | None = None) -> Any:
    """The norm of ``hidden_states``; with ``more``, the pair of their sum and its norm."""
    kernels, made = layer_kernels(hidden_states.device), None
    if kernels is not None:
        made = kernels.norm(hidden_states, more, norm._parameters["weight"], norm.variance_epsilon, exact)
    if made is None:
        total = hidden_states if more is None else hidden_states + more
        made = total, type(norm).forward(norm, total)
    return made[1] if more is None else made


def _layer(layer: Any, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
    """What a decoder layer computes, the sum behind attention within the norm that follows."""
    children = layer._modules
    attended, _ = called(children["self_attn"], hidden_states=called(children["input_layernorm"], hidden_states), **given)
    residual, hidden = called(children["post_attention_layernorm"], hidden_states, attended)
    return residual + called(children["mlp"], hidden)

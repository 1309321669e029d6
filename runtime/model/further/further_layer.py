"""The layer that predicts further tokens: a decoder's own, behind a projection of embedding and hidden state."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.runtime.model.further.hidden_rows import HiddenRows


class FurtherLayer:
    """Makes the decoder of one layer what ``planner.contract.checkpoint.further_heads`` describes: the layer's input is
    ``eh_proj(cat(enorm(embedding), hnorm(hidden)))``."""

    def convert(self, model: PreTrainedModel) -> None:
        decoder: Any = model.get_decoder()
        (layer,) = decoder.layers
        width = model.config.get_text_config().hidden_size
        layer.enorm, layer.hnorm = deepcopy(decoder.norm), deepcopy(decoder.norm)
        layer.eh_proj = nn.Linear(2 * width, width, bias=False, device="meta", dtype=decoder.norm.weight.dtype)
        layer.eh_proj.requires_grad_(False)


def feed(model: PreTrainedModel, hidden: HiddenRows) -> None:
    """Have the layer of ``model``, which :class:`FurtherLayer` made, read ``hidden``."""
    (layer,) = model.get_decoder().layers

    def hook(_module: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        embedded = args[0] if args else given["hidden_states"]
        before = hidden.of(embedded.shape[1])[None]
        projected = layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(before)], -1))
        return ((projected, *args[1:]), given) if args else ((), given | {"hidden_states": projected})

    layer.register_forward_pre_hook(hook, with_kwargs=True)

"""Scores of the coming MoE layer's experts, from the hidden state that goes into today's: for policies that fetch by them."""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from planner.errors import UserError
from planner.policy.experts import AheadScores
from runtime.moe.modules import layers_with_experts


class Ahead(Protocol):
    """Is shown every MoE layer's input in turn, and scores the experts of the layer after it."""

    def scores(self, layer: int, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor | None:
        """``hidden`` [tokens, width] is routed to ``index`` [tokens, top_k] in ``layer`` -> [tokens, experts] of the MoE layer after it.
        More is likelier; all are alike while nothing is known of that. None behind the last layer."""


class RouterAhead:
    """The coming layer's own router applied to today's hidden state.

    Costs a copy of every router's weight, taken when its layer is first computed: [experts, width] a layer.
    """

    def __init__(self, layers: nn.ModuleList):
        self._routers = {layer: _router(layers[layer].mlp) for layer, _ in layers_with_experts(layers)}
        self._after = dict(pairwise(self._routers))
        self._weights: dict[int, torch.Tensor] = {}

    def scores(self, layer: int, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor | None:
        if layer not in self._weights:
            self._weights[layer] = self._routers[layer].weight.clone()
        if layer not in self._after:
            return None
        after = self._after[layer]
        if after not in self._weights:
            return torch.zeros(len(hidden), len(self._routers[after].weight), device=hidden.device)
        return F.linear(hidden, self._weights[after].to(hidden.dtype)).float().softmax(-1)


class CentroidsAhead:
    """How near a token's hidden state comes, by cosine, to the mean of those that each expert of the coming layer has had.

    Costs [experts, width] floats a layer.
    """

    def __init__(self, layers: nn.ModuleList):
        self._counts = {layer: module.num_experts for layer, module in layers_with_experts(layers)}
        self._after = dict(pairwise(self._counts))
        self._sums: dict[int, torch.Tensor] = {}

    def scores(self, layer: int, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor | None:
        states = hidden.float()
        if layer not in self._sums:
            self._sums[layer] = torch.zeros(self._counts[layer], hidden.shape[-1], device=hidden.device)
        self._sums[layer].index_add_(0, index.reshape(-1), states.repeat_interleave(index.shape[1], 0))
        if layer not in self._after:
            return None
        after = self._after[layer]
        if after not in self._sums:
            return torch.zeros(len(hidden), self._counts[after], device=hidden.device)
        return F.normalize(states, dim=1) @ F.normalize(self._sums[after], dim=1).T


def make_ahead(needed: AheadScores | None, layers: nn.ModuleList) -> Ahead | None:
    """What a policy needs; None for one that looks at routings alone. UserError where the model has no such router."""
    if needed is None:
        return None
    return RouterAhead(layers) if needed is AheadScores.router else CentroidsAhead(layers)


def _router(block: nn.Module) -> nn.Module:
    gate = getattr(block, "gate", None)
    if not isinstance(getattr(gate, "weight", None), nn.Parameter):
        raise UserError(f"{type(block).__name__} has no router named gate; use another experts.policy than lookahead")
    return gate

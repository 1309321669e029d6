"""Scores of the coming MoE layers' experts, from the hidden state that goes into today's: for policies that fetch by them."""

from __future__ import annotations

from itertools import pairwise
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from penstock.planner.common.errors import UserError
from penstock.planner.contract.experts.policies import AheadScores
from penstock.planner.contract.experts.policies.far import reach
from penstock.runtime.store.expert_modules import experts_module, layers_with_experts

ROUTERS = ("gate", "router")
"""Names that a block gives the router of its experts."""


class Ahead(Protocol):
    """Is shown every MoE layer's input in turn, and scores the experts of layers after it."""

    def scores(self, layer: int, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor | None:
        """``hidden`` [tokens, width] is routed to ``index`` [tokens, top_k] in ``layer`` -> [tokens, layers, experts] of the MoE layers
        after it, the nearest first. More is likelier; all are alike while nothing is known of that. None behind the last layer."""


class RouterAhead:
    """The coming layers' own routers applied to today's hidden state: one product, of as many layers as ``far.reach`` says.

    Costs a copy of every router's weight, taken when its layer is first computed: [experts, width] a layer.
    """

    def __init__(self, layers: nn.ModuleList):
        found = dict(layers_with_experts(layers))
        self._routers = [_router(layers[layer]) for layer in found]
        self._place = {layer: place for place, layer in enumerate(found)}
        (self._count,) = {module.num_experts for module in found.values()}
        self._reach = reach(len(found), self._count)
        self._weights: torch.Tensor | None = None
        self._taken: set[int] = set()

    def scores(self, layer: int, hidden: torch.Tensor, index: torch.Tensor) -> torch.Tensor | None:
        place, count = self._place[layer], self._count
        if self._weights is None:
            self._weights = hidden.new_zeros(len(self._routers) * count, hidden.shape[-1])
        if place not in self._taken:
            self._taken.add(place)
            self._weights[place * count : (place + 1) * count] = self._routers[place].get_parameter("weight")
        if place + 1 == len(self._routers):
            return None
        coming = self._weights[(place + 1) * count : (place + 1 + self._reach) * count]
        return F.linear(hidden, coming).float().view(len(hidden), -1, count).softmax(-1)


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
            return torch.zeros(len(hidden), 1, self._counts[after], device=hidden.device)
        return (F.normalize(states, dim=1) @ F.normalize(self._sums[after], dim=1).T)[:, None]


def make_ahead(needed: AheadScores | None, layers: nn.ModuleList) -> Ahead | None:
    """What a policy needs; None for one that looks at routings alone. UserError where the model has no such router."""
    if needed is None:
        return None
    return RouterAhead(layers) if needed is AheadScores.router else CentroidsAhead(layers)


def _router(layer: nn.Module) -> nn.Module:
    name, _ = experts_module(layer) or ("", layer)
    block = layer.get_submodule(name.rpartition(".")[0])
    for name in ROUTERS:
        router = getattr(block, name, None)
        if isinstance(router, nn.Module) and isinstance(getattr(router, "weight", None), nn.Parameter):
            return router
    raise UserError(f"{type(block).__name__} has no router named {' or '.join(ROUTERS)}; use another experts.policy than lookahead")

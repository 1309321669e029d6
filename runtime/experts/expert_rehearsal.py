"""Experts that lie anywhere: for passes that load kernels and take activations before weights have arrived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle

import torch

from penstock.planner.contract.experts.expert_cache import Routing
from penstock.runtime.experts.expert_forward import Arrived, Fit, Group
from penstock.runtime.model.binding import views
from penstock.runtime.store.base import TensorLayout


class RehearsedExperts:
    """Feeds the experts of layers with ``count`` each from ``places`` in turns, as far apart as they can be. One place alone would stay in
    the processor's cache.

    Several tokens are routed as unequally as a prompt's: all to the first expert, so that no later pass has an expert with more rows. Their
    last choice sends half of them to another expert, half of the rest to the next, and so on.
    """

    def __init__(self, tensors: Sequence[TensorLayout], places: Sequence[torch.Tensor], count: int):
        self._views = cycle([views(tensors, place) for place in places])
        self._count = count

    def route(self, index: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        tokens, top_k = index.shape
        chosen = torch.arange(top_k, device=index.device, dtype=index.dtype).repeat(tokens, 1)
        if tokens > 1 and top_k > 1:
            nth = torch.arange(1, tokens + 1, device=index.device)
            chosen[:, -1] += torch.log2(tokens / nth).to(index.dtype).clamp(max=self._count - top_k)
        return chosen

    def visit(self, layer: int, routing: Routing, fit: Fit) -> Iterator[Sequence[Arrived]]:
        experts = routing.experts
        while experts:
            number = fit(experts)
            together, experts = experts[:number], experts[number:]
            yield [(expert, next(self._views)) for expert in together]

    def groups(self, layer: int, routing: Routing) -> Iterator[Group]:
        yield Group([(expert, next(self._views)) for expert in routing.experts])

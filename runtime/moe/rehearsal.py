"""Experts that lie anywhere: for passes that load kernels and take activations before weights have arrived."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from planner.moe.cache import Routing
from runtime.model import views
from runtime.moe.forward import Arrived
from runtime.store.base import TensorLayout


class RehearsedExperts:
    """Feeds every expert from one and the same ``place``. All tokens go to the same experts, so that no later pass has an expert with more
    rows."""

    def __init__(self, tensors: Sequence[TensorLayout], place: torch.Tensor):
        self._views = views(tensors, place)

    def route(self, index: torch.Tensor) -> torch.Tensor:
        return torch.arange(index.shape[1], device=index.device, dtype=index.dtype).expand_as(index)

    def visit(self, layer: int, routing: Routing) -> Iterator[Arrived]:
        for expert in routing.experts:
            yield expert, self._views

"""Routed experts of which every rank has a slice: who tells whom, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from penstock.planner.common.errors import UserError
from penstock.runtime.experts.expert_forward import LayerExperts, experts_of
from penstock.runtime.ranks.dealt_layer import Ways
from penstock.runtime.store.expert_modules import ExpertsModule


class ToldExperts:
    """``expert_forward.Sharing`` of a layer's own rank: each of the ``others`` is told, computes with its slices, and sends its sum.

    Takes of each token what is told, and in float32 the sum.
    """

    def __init__(self, ways: Callable[[], Ways], others: Sequence[int]):
        self._ways, self._others = ways, others

    def tell(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
        parts = hidden, index.to(torch.int32), weights.to(torch.float32)
        told = torch.cat([part.contiguous().view(torch.uint8) for part in parts], dim=1)
        for rank in self._others:
            self._ways().of(rank).send(told)

    def summed(self, made: torch.Tensor) -> torch.Tensor:
        whole, other = made.float(), torch.empty_like(made)
        for rank in self._others:
            self._ways().of(rank).receive(other)
            whole += other
        return whole.to(made.dtype)


class ServedExperts:
    """This rank's slices of a layer of rank ``owner``, whose tokens have ``top_k`` experts each."""

    def __init__(self, experts: LayerExperts, ways: Callable[[], Ways], owner: int, top_k: int):
        self._experts, self._ways, self._owner, self._top_k = experts, ways, owner, top_k

    def serve(self, like: torch.Tensor) -> None:
        """Compute what is told of a pass whose hidden states are ``like`` [1, tokens, hidden]."""
        tokens, width = like.shape[1], like.shape[2] * like.element_size()
        told = torch.empty(tokens, width + 8 * self._top_k, dtype=torch.uint8, device=like.device)
        way = self._ways().of(self._owner)
        way.receive(told)
        hidden, index, weights = (part.contiguous() for part in told.split([width, 4 * self._top_k, 4 * self._top_k], dim=1))
        way.send(self._experts(hidden.view(like.dtype), index.view(torch.int32).long(), weights.view(torch.float32)))


class Served:
    """The layers that are served one after the other, between two of this rank's own."""

    def __init__(self, layers: Sequence[ServedExperts]):
        self._layers = layers

    def before(self, _layer: object, args: Sequence[torch.Tensor], named: Mapping[str, torch.Tensor]) -> None:
        """A hook before a layer of this rank's."""
        self._serve(args[0] if args else named["hidden_states"])

    def behind(self, _layer: object, _args: object, made: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        """A hook behind this rank's last one."""
        self._serve(made[0] if isinstance(made, tuple) else made)

    def _serve(self, like: torch.Tensor) -> None:
        for layer in self._layers:
            layer.serve(like)


def sliced_experts(modules: Mapping[int, ExpertsModule], count: int) -> Mapping[int, LayerExperts]:
    """What the experts of each layer compute with, where they can be cut into ``count`` slices. UserError where they cannot."""
    for module in modules.values():
        plain = not (module.has_bias or module.is_transposed or hasattr(module, "stored_experts"))
        if not plain or module.get_parameter("down_proj").shape[2] % count:
            raise UserError(f"{type(module).__name__}: has experts that are not cut into {count} slices; solve again with moe.share=whole")
    return {number: experts_of(module) for number, module in modules.items()}

"""Weights that lie in a buffer, as a module's parameters: views, and who puts them in place as their turn comes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.reading.layout import TensorLayout
from penstock.runtime.store.decoder import decoder_layers, submodule


class WeightStream(Protocol):
    """Units as compute meets them, in forward order, pass after pass: those that stay where they are feed no parameters."""

    def begin_pass(self) -> None: ...

    def enter(self, unit: Unit) -> Mapping[str, nn.Parameter]:
        """The unit's parameters by name; valid until :meth:`leave`."""

    def leave(self, unit: Unit) -> None: ...

    def end_pass(self) -> None:
        """The model has returned."""


def views(tensors: Sequence[TensorLayout], buffer: torch.Tensor) -> dict[str, torch.Tensor]:
    """Tensors over ``buffer`` (uint8), sharing its memory."""
    return {t.name: buffer[t.offset : t.offset + t.nbytes].view(t.dtype).view(t.shape) for t in tensors}


def parameters(tensors: Sequence[TensorLayout], buffer: torch.Tensor) -> dict[str, nn.Parameter]:
    """The same as parameters."""
    return {name: nn.Parameter(view, requires_grad=False) for name, view in views(tensors, buffer).items()}


def bind(module: nn.Module, params: Mapping[str, nn.Parameter]) -> None:
    """Point ``module``'s parameters, by relative name, at ``params``."""
    for name, param in params.items():
        owner, _, leaf = name.rpartition(".")
        module.get_submodule(owner)._parameters[leaf] = param


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Bring buffers (rotary frequencies, scales) to ``device``."""
    for module in model.modules():
        module._buffers.update({name: b.to(device) for name, b in module._buffers.items() if b is not None})


class Binder:
    """Forward hooks around every block of ``model``: a streamed unit is bound before it runs and given back after.

    ``stream`` may be exchanged between passes. The parameter dictionaries of each block are looked up once; binding on the hot
    path is one assignment a parameter.
    """

    def __init__(self, model: nn.Module, units: Sequence[Unit], stream: WeightStream):
        self.stream = stream
        layers = decoder_layers(model)
        for unit in units:
            module = submodule(layers, unit)
            module.register_forward_pre_hook(self._entering(unit, module))
            module.register_forward_hook(self._leaving(unit))
        model.register_forward_hook(lambda *_: self.stream.end_pass())

    def _entering(self, unit: Unit, module: nn.Module) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        owners = {
            name: (module.get_submodule(name.rpartition(".")[0])._parameters, name.rpartition(".")[2])
            for name, _ in module.named_parameters()
        }

        def hook(_module: nn.Module, _args: tuple[Any, ...]) -> None:
            for name, param in self.stream.enter(unit).items():
                owner, leaf = owners[name]
                owner[leaf] = param

        return hook

    def _leaving(self, unit: Unit) -> Callable[[nn.Module, tuple[Any, ...], object], None]:
        def hook(_module: nn.Module, _args: tuple[Any, ...], _output: object) -> None:
            self.stream.leave(unit)

        return hook

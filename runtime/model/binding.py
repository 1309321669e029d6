"""Weights that lie in a buffer, as a module's parameters: views, and who puts them in place as their turn comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.reading.layout import TensorLayout
from penstock.runtime.store.decoder import decoder_layers, unit_modules


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
    """Has every block of ``model`` computed with what ``stream`` brings: a unit is bound before the first of its modules runs, and given
    back after the last one.

    Units are entered and left in their order. Those that a pass does not call are entered and left as it passes them. While :attr:`held`
    none is left, so that a layer can be computed several times. ``stream`` may be exchanged between passes. The parameter dictionaries of
    each unit are looked up once; binding on the hot path is one assignment a parameter.
    """

    def __init__(self, model: PreTrainedModel, units: Sequence[Unit], stream: WeightStream):
        self.stream = stream
        self._gate: Callable[[], None] | None = None
        self.held = False
        """Whether units stay entered that were, until it is over."""
        self._units, self._at, self._entered = list(units), 0, 0
        layers = decoder_layers(model)
        for number, unit in enumerate(self._units):
            layer, modules = layers[unit.layer], _called(unit_modules(layers, unit).values())
            owners = _owners(layer, unit_modules(layers, unit))
            for module in modules:
                module.register_forward_pre_hook(self._entering(number, owners))
            if len(modules) == 1:
                modules[0].register_forward_hook(self._leaving(number))
            elif modules:
                layer.register_forward_hook(self._leaving(number))
        model.get_output_embeddings().register_forward_pre_hook(lambda *_: self._finish())
        model.register_forward_hook(lambda *_: None if self._gate is not None else self.end_pass())

    @contextmanager
    def fed_by(self, stream: WeightStream) -> Iterator[None]:
        """Inside, passes are fed by another ``stream``."""
        before, self.stream = self.stream, stream
        try:
            yield
        finally:
            self.stream = before

    def begin_pass(self) -> None:
        """A pass comes next, whatever became of the one before."""
        self._at, self._entered, self.held = 0, 0, False
        self.stream.begin_pass()

    def _entering(self, number: int, owners: Mapping[str, _Owner]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(_module: nn.Module, _args: tuple[Any, ...]) -> None:
            if self._is_inside(number):
                return
            if self._gate is not None:
                self._gate()
                if self._is_inside(number):
                    return
            self._pass_by(number)
            self._entered = number + 1
            for name, param in self.stream.enter(self._units[number]).items():
                owner, leaf = owners[name]
                owner[leaf] = param

        return hook

    def _is_inside(self, number: int) -> bool:
        """Whether unit ``number`` is entered. Those before it are left, unless they are held."""
        if not self._at <= number < self._entered:
            return False
        while self._at < number and not self.held:
            self._leave()
        return True

    def _leaving(self, number: int) -> Callable[[nn.Module, tuple[Any, ...], object], None]:
        def hook(_module: nn.Module, _args: tuple[Any, ...], _output: object) -> None:
            if self._at == number < self._entered and self._gate is None and not self.held:
                self._leave()

        return hook

    def _leave(self) -> None:
        self.stream.leave(self._units[self._at])
        self._at += 1

    def _pass_by(self, number: int) -> None:
        """Come to unit ``number``, of which nothing was entered yet."""
        if number < self._entered:
            raise RuntimeError(f"unit {self._units[number]} is computed after {self._units[self._entered - 1]}, which comes behind it")
        while True:
            while self._at < self._entered and not self.held:
                self._leave()
            if self._entered == number:
                return
            self.stream.enter(self._units[self._entered])
            self._entered += 1

    def open(self, gate: Callable[[], None] | None) -> None:
        """Rows are computed in lockstep from now on: ``gate`` returns when all of them have come to the unit that is entered next. None:
        rows are packed."""
        self._gate = gate

    def end_pass(self) -> None:
        """The model has returned."""
        self._pass_by(len(self._units))
        self.stream.end_pass()

    def _finish(self) -> None:
        """The pass has left the layers."""
        if self._gate is not None:
            self._gate()
        self._pass_by(len(self._units))


_Owner = tuple[dict[str, nn.Parameter | None], str]
"""A module's parameters, and the name of one of them."""


def _owners(layer: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, _Owner]:
    """Where each parameter of a unit is bound, by its name in the layer."""
    names = [f"{child}.{name}" for child, module in modules.items() for name, _ in module.named_parameters()]
    return {n: (layer.get_submodule(n.rpartition(".")[0])._parameters, n.rpartition(".")[2]) for n in names}


def _called(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Those that have a forward of their own: of a list its members."""
    return [m for module in modules for m in (_called(module) if isinstance(module, nn.ModuleList) else [module])]

"""The `transformers` model around the stream: built without weights, its blocks bound to whatever bytes lie there this turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.store.base import Store, TensorLayout, open_store


class WeightStream(Protocol):
    """Units as compute meets them, in forward order, pass after pass: those that stay where they are feed no parameters."""

    def begin_pass(self) -> None: ...

    def enter(self, unit: Unit) -> Mapping[str, nn.Parameter]:
        """The unit's parameters by name; valid until :meth:`leave`."""

    def leave(self, unit: Unit) -> None: ...

    def end_pass(self) -> None:
        """The model has returned."""


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made inside keep their buffers real (rotary frequencies are computed) and their parameters empty."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, None if param is None else nn.Parameter(param.to("meta"), requires_grad=False))

    nn.Module.register_parameter = register
    try:
        yield
    finally:
        nn.Module.register_parameter = original


@dataclass(frozen=True)
class Skeleton:
    """A checkpoint's model on the meta device, with the store that its weights come from."""

    model: nn.Module
    store: Store

    @property
    def layers(self) -> nn.ModuleList:
        return decoder_layers(self.model)


def open_skeleton(directory: Path) -> Skeleton:
    """Build the model of ``directory`` and open its weights; reads headers only."""
    model = build_skeleton(directory)
    return Skeleton(model, open_store(directory, model))


def import_model(directory: Path) -> None:
    """Import the module that defines ``directory``'s model, which transformers would do when the model is built."""
    with _told(directory):
        AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(directory))]


def build_skeleton(directory: Path) -> nn.Module:
    """The checkpoint's causal LM with every parameter on the meta device; takes no memory for weights."""
    with _told(directory):
        config = AutoConfig.from_pretrained(directory)
        with _parameters_on_meta(), no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=config.dtype or torch.float32)
    model.tie_weights()
    return model.eval()


@contextmanager
def _told(directory: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"{directory}: transformers cannot build this model: {str(error).splitlines()[0]}") from error


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder layers: modules with ``self_attn`` and ``mlp``."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) and all(hasattr(m, "self_attn") and hasattr(m, "mlp") for m in module):
            return module
    raise UserError(f"{type(model).__name__} has no decoder layers with self_attn and mlp; such models cannot be streamed")


def submodule(layers: nn.ModuleList, unit: Unit) -> nn.Module:
    """The module that ``unit`` feeds."""
    return layers[unit.layer].self_attn if unit.kind == "attn" else layers[unit.layer].mlp


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

    def _entering(self, unit: Unit, module: nn.Module) -> Callable[[nn.Module, tuple], None]:
        owners = {
            name: (module.get_submodule(name.rpartition(".")[0])._parameters, name.rpartition(".")[2])
            for name, _ in module.named_parameters()
        }

        def hook(_module: nn.Module, _args: tuple) -> None:
            for name, param in self.stream.enter(unit).items():
                owner, leaf = owners[name]
                owner[leaf] = param

        return hook

    def _leaving(self, unit: Unit) -> Callable[[nn.Module, tuple, object], None]:
        def hook(_module: nn.Module, _args: tuple, _output: object) -> None:
            self.stream.leave(unit)

        return hook


class BlockedHead(nn.Module):
    """An LM head whose row blocks come one after the other: ``resident`` blocks lie in VRAM, the rest are streamed.

    Input [..., hidden], output [..., vocab]; costs one block's logits beside the output.
    """

    def __init__(self, rows: Sequence[tuple[int, int]], resident: Mapping[int, torch.Tensor], binder: Binder, replaced: nn.Module):
        super().__init__()
        self._rows = rows
        self._resident = resident
        self._binder = binder
        self.register_parameter("bias", getattr(replaced, "bias", None))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out = hidden.new_empty(*hidden.shape[:-1], self._rows[-1][1])
        for j, (first, last) in enumerate(self._rows):
            block, unit = self._resident.get(j), Unit("head", j)
            weight = self._binder.stream.enter(unit)["weight"] if block is None else block
            out[..., first:last] = F.linear(hidden, weight)
            if block is None:
                self._binder.stream.leave(unit)
        return out if self.bias is None else out + self.bias

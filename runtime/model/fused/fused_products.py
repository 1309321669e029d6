"""Layers that multiply the same token, queries, keys and values or gate and up, by one launch for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from penstock.runtime.formats.coding import JoinedCoding
from penstock.runtime.formats.stored_linear import DECODED, StoredLinear
from penstock.runtime.model.fused.known_code import given_alike

_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FusedProducts:
    """For coded layers beside each other, of one format and without bias, that their module's code gives the same input."""

    def convert(self, model: PreTrainedModel) -> None:
        for module in model.modules():
            for names in _GROUPS:
                layers = [child for name in names if isinstance(child := getattr(module, name, None), StoredLinear)]
                if len(layers) == len(names) and _alike(layers) and given_alike(type(module).forward, names):
                    together = OneInput(layers)
                    for layer in layers:
                        layer.together = together


class OneInput:
    """``layers``, called one after the other. The first computes for all; what the others are to give waits until they are asked for the
    very same tensor. Costs their results meanwhile."""

    def __init__(self, layers: Sequence[StoredLinear]):
        self._layers = layers
        self._given: torch.Tensor | None = None
        self._made: dict[int, torch.Tensor] = {}

    def product(self, layer: StoredLinear, x: torch.Tensor) -> torch.Tensor | None:
        """See :class:`penstock.runtime.formats.stored_linear.Together`."""
        if layer is self._layers[0]:
            self._compute(x)
        made = self._made.pop(id(layer), None) if x is self._given else None
        if not self._made:
            self._given = None
        return made

    def _compute(self, x: torch.Tensor) -> None:
        self._given, self._made = None, {}
        coding = self._layers[0].coding
        if x.numel() != self._layers[0].in_features or not isinstance(coding, JoinedCoding):
            return
        if any(layer._parameters[DECODED] is not None for layer in self._layers):
            return
        made = coding.joined(x.reshape(1, -1), [layer.parts for layer in self._layers])
        if made is not None:
            each = made.split([layer.out_features for layer in self._layers], dim=1)
            shapes = [(*x.shape[:-1], layer.out_features) for layer in self._layers]
            self._given = x
            self._made = {id(layer): one.view(shape) for layer, one, shape in zip(self._layers, each, shapes, strict=True)}


def _alike(layers: Sequence[StoredLinear]) -> bool:
    """Whether all are of one format, in one dtype, with as many columns, and without bias."""
    kinds = {(layer.form, layer.coding, layer.in_features, layer.dtype) for layer in layers}
    return len(kinds) == 1 and all(layer.bias is None for layer in layers)

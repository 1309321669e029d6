"""A linear layer whose matrix is stored coded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import nn

from penstock.planner.contract.given.formats import Format
from penstock.runtime.formats.coding import Coding, Parts
from penstock.runtime.formats.scratch import Scratch
from penstock.runtime.formats.stored_parameters import StoredParameter

DECODED = "decoded"
"""The parameter that holds the matrix of a layer that stays decoded."""


class Together(Protocol):
    """Layers that are given the same input, one after the other."""

    def product(self, layer: StoredLinear, x: torch.Tensor) -> torch.Tensor | None:
        """What ``layer`` is to give for ``x``; None where it computes that by itself."""


class StoredLinear(nn.Module):
    """In place of an ``nn.Linear``: its parameters are the stored tensors, by their leaves, and the ``bias`` where there is one.

    ``parts`` are empty, on the meta device until weights are bound; ``stored`` says what fills them. Decoding takes no memory beside
    ``scratch``: a matrix with more elements, as an LM head is, is decoded and multiplied by some rows at a time.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        replaced: nn.Linear,
        form: Format,
        coding: Coding,
        parts: Mapping[str, nn.Parameter],
        stored: Mapping[str, StoredParameter],
        scratch: Scratch,
    ):
        super().__init__()
        self.in_features, self.out_features = replaced.in_features, replaced.out_features
        self.dtype = replaced.weight.dtype
        """Computed in."""
        self.stored_parameters = stored
        self.form, self.coding = form, coding
        self.together: Together | None = None
        """Beside which it computes; nobody until somebody says so."""
        self.scratch = scratch
        for leaf, part in parts.items():
            self.register_parameter(leaf, part)
        self.register_parameter("bias", replaced.bias)
        self.register_parameter(DECODED, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        held = self._parameters
        plain = held[DECODED]
        if plain is not None:
            return F.linear(x, plain, self.bias)
        made = None if self.together is None else self.together.product(self, x)
        return self.product(x, self.parts, self.out_features, self.bias) if made is None else made

    @property
    def parts(self) -> dict[str, torch.Tensor]:
        """The stored tensors, by their leaves; those alone that are there."""
        held = self._parameters
        return {leaf: part for leaf in self.stored_parameters if (part := held[leaf]) is not None}

    def product(self, x: torch.Tensor, parts: Parts, rows: int, bias: torch.Tensor | None = None) -> torch.Tensor:
        """[..., in_features] -> [..., rows] by ``parts``: those of ``rows`` of the matrix."""
        if not x.is_cuda or x.numel() <= self.form.product_rows * self.in_features:
            made = self.coding.linear(x.reshape(-1, self.in_features), parts, bias)
            if made is not None:
                return made.view(*x.shape[:-1], rows)
        most = self.scratch.elements // self.in_features
        if rows <= most:
            return F.linear(x, self._decoded(parts, rows, x.device), bias)
        out = x.new_empty(*x.shape[:-1], rows)
        for first in range(0, rows, most):
            some = {leaf: part[first : first + most] for leaf, part in parts.items()}
            weight = self._decoded(some, min(most, rows - first), x.device)
            out[..., first : first + most] = F.linear(x, weight)
        return out if bias is None else out.add_(bias)

    def in_scratch(self, parts: Parts) -> torch.Tensor:
        """The whole matrix, in the scratch."""
        return self._decoded(parts, self.out_features, next(iter(parts.values())).device)

    def _decoded(self, parts: Parts, rows: int, device: torch.device) -> torch.Tensor:
        weight = self.scratch.of(rows, self.in_features, self.dtype, device)
        self.coding.decode(parts, weight)
        return weight

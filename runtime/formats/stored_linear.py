"""A linear layer whose matrix is stored coded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from penstock.planner.contract.given.formats import Format
from penstock.runtime.formats.coding import Coding
from penstock.runtime.formats.scratch import Scratch
from penstock.runtime.formats.stored_parameters import StoredParameter


class StoredLinear(nn.Module):
    """In place of an ``nn.Linear``: its parameters are the stored tensors, by their leaves, and the ``bias`` where there is one.

    ``parts`` are empty tensors of the leaves' shapes and dtypes, on the meta device until weights are bound; ``stored`` says what fills
    them. Decoding takes no memory beside ``scratch``.
    """

    def __init__(
        self,
        replaced: nn.Linear,
        form: Format,
        coding: Coding,
        parts: Mapping[str, torch.Tensor],
        stored: Mapping[str, StoredParameter],
        scratch: Scratch,
    ):
        super().__init__()
        self.in_features, self.out_features = replaced.in_features, replaced.out_features
        self.dtype = replaced.weight.dtype
        """Computed in."""
        self.stored_parameters = stored
        self._form, self._coding, self._scratch = form, coding, scratch
        for leaf, part in parts.items():
            self.register_parameter(leaf, nn.Parameter(part, requires_grad=False))
        self.register_parameter("bias", replaced.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        held = self._parameters
        parts = {leaf: part for leaf in self.stored_parameters if (part := held[leaf]) is not None}
        if x.is_cuda and x.numel() <= self._form.product_rows * self.in_features:
            made = self._coding.linear(x.reshape(-1, self.in_features), parts, self.bias)
            if made is not None:
                return made.view(*x.shape[:-1], self.out_features)
        weight = self._scratch.of(self.out_features, self.in_features, self.dtype, x.device)
        self._coding.decode(parts, weight)
        return F.linear(x, weight, self.bias)

"""A linear layer whose matrix is stored coded."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from penstock.runtime.formats.coding import Coding
from penstock.runtime.formats.scratch import Scratch


class StoredLinear(nn.Module):
    """In place of an ``nn.Linear``: its parameters are the stored tensors, by their leaves, and the ``bias`` where there is one.

    ``parts``: (shape, dtype) of each leaf, on the meta device until weights are bound. Decoding costs no memory beside ``scratch``.
    """

    def __init__(
        self,
        replaced: nn.Linear,
        format: str,
        coding: Coding,
        parts: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
        sources: Mapping[str, str],
        scratch: Scratch,
    ):
        super().__init__()
        self.in_features, self.out_features = replaced.in_features, replaced.out_features
        self.dtype = replaced.weight.dtype
        """Computed in."""
        self.format = format
        self.sources = sources
        """Leaf -> the checkpoint's tensor."""
        self._coding, self._scratch, self._leaves = coding, scratch, tuple(parts)
        for leaf, (shape, dtype) in parts.items():
            self.register_parameter(leaf, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False))
        self.register_parameter("bias", replaced.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        known = self._parameters
        parts = {leaf: known[leaf] for leaf in self._leaves}
        bias = known["bias"]
        made = self._coding.linear(x.reshape(-1, self.in_features), parts, bias)
        if made is not None:
            return made.view(*x.shape[:-1], self.out_features)
        weight = self._scratch.of(self.out_features, self.in_features, self.dtype, x.device)
        self._coding.decode(parts, weight)
        return F.linear(x, weight, bias)

"""Matrices in a float type that are stored in another order of rows than they are computed with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class PlainRows:
    """Leaf ``weight`` [rows, columns]: what decoding does is to copy it."""

    def decode(self, parts: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        out.copy_(parts["weight"])

    def linear(self, x: torch.Tensor, parts: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor | None:
        return None

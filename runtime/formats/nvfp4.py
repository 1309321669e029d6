"""NVFP4: numbers of 4 bits, for each 16 of them along a row a scale of 8 bits, and one factor for the matrix."""

from __future__ import annotations

import torch

from penstock.runtime.formats.coding import Parts
from penstock.runtime.formats.e2m1 import E2m1Coding, unpack
from penstock.runtime.formats.kernels.e2m1_matrix import E2m1Matrix


class Nvfp4(E2m1Coding):
    """Leaves ``weight`` [rows, columns / 2] uint8, two numbers a byte, the lower half first; ``weight_scale`` [rows, columns / 16] E4M3; in
    F32 either ``factor`` (ModelOpt's ``weight_scale_2``) or ``divisor`` (compressed-tensors' ``weight_global_scale``).

    A number times (scale * factor), or (scale / divisor), in F32, rounded once: what ModelOpt and compressed-tensors decode to. Several
    matrices joined by their rows, all of one height, have a factor each.
    """

    def decode_here(self, parts: Parts, out: torch.Tensor) -> None:
        matrix = self.on_card(parts, None)
        assert matrix.factors is not None
        scale, factors = matrix.scales.float(), matrix.factors.view(-1, 1, 1)
        scale = scale.view(len(factors), -1, scale.shape[-1])
        unpack(matrix.codes, scale / factors if matrix.divides else scale * factors, out)

    def on_card(self, parts: Parts, bias: torch.Tensor | None) -> E2m1Matrix:
        divides = "divisor" in parts
        return E2m1Matrix(parts["weight"], parts["weight_scale"], parts["divisor" if divides else "factor"], divides, bias)

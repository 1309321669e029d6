"""MXFP4: numbers of 4 bits, and for each 32 of them along a row one power of two."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from penstock.runtime.formats.coding import Parts
from penstock.runtime.formats.e2m1 import unpack
from penstock.runtime.formats.kernels.e2m1_matrix import E2m1Matrix
from penstock.runtime.formats.kernels.on_card import e2m1_kernels


class Mxfp4:
    """Leaves ``blocks`` [rows, columns / 32, 16], two numbers a byte, the lower half first, and ``scales`` [rows, columns / 32], E8M0, both
    uint8. ``blocks`` may be [rows, columns / 2] as well.

    A number times 2 ** (scale - 127), rounded once: what transformers' ``convert_moe_packed_tensors`` gives, not transposed. A scale of 255
    is not a number, as OCP Microscaling 1.0 has it.
    """

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        kernels = e2m1_kernels(out.device)
        if kernels is not None:
            kernels.decode(self.on_card(parts, None), out)
            return
        factors = parts["scales"].view(torch.float8_e8m0fnu)
        unpack(parts["blocks"], factors.to(torch.bfloat16 if out.dtype is torch.bfloat16 else torch.float32), out)

    def linear(self, x: torch.Tensor, parts: Parts, bias: torch.Tensor | None) -> torch.Tensor | None:
        kernels = e2m1_kernels(x.device)
        return None if kernels is None else kernels.linear(x, self.on_card(parts, bias))

    def experts(self, x: torch.Tensor, experts: Sequence[Parts], biases: Sequence[torch.Tensor] | None) -> torch.Tensor | None:
        kernels = e2m1_kernels(x.device)
        if kernels is None:
            return None
        return kernels.experts(x, [self.on_card(parts, None if biases is None else biases[n]) for n, parts in enumerate(experts)])

    def on_card(self, parts: Parts, bias: torch.Tensor | None) -> E2m1Matrix:
        """As kernels take it."""
        return E2m1Matrix(parts["blocks"], parts["scales"], bias=bias)

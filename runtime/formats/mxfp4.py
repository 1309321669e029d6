"""MXFP4: numbers of 4 bits, and for each 32 of them along a row one power of two."""

from __future__ import annotations

import torch

from penstock.runtime.formats.coding import Parts
from penstock.runtime.formats.e2m1 import E2m1Coding, unpack
from penstock.runtime.formats.kernels.e2m1_matrix import E2m1Matrix


class Mxfp4(E2m1Coding):
    """Leaves ``blocks`` [rows, columns / 32, 16], two numbers a byte, the lower half first, and ``scales`` [rows, columns / 32], E8M0, both
    uint8. ``blocks`` may be [rows, columns / 2] as well.

    A number times 2 ** (scale - 127), rounded once: what transformers' ``convert_moe_packed_tensors`` gives, not transposed. A scale of 255
    is not a number, as OCP Microscaling 1.0 has it.
    """

    def decode_here(self, parts: Parts, out: torch.Tensor) -> None:
        factors = parts["scales"].view(torch.float8_e8m0fnu)
        unpack(parts["blocks"], factors.to(torch.bfloat16 if out.dtype is torch.bfloat16 else torch.float32), out)

    def on_card(self, parts: Parts, bias: torch.Tensor | None) -> E2m1Matrix:
        return E2m1Matrix(parts["blocks"], parts["scales"], bias=bias)

"""FP8 E4M3 times scales: of blocks of 128 x 128, of rows, or one for the matrix."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.runtime.formats.coding import Parts
from penstock.runtime.formats.kernels.fp8_matrix import Fp8Matrix
from penstock.runtime.formats.kernels.on_card import fp8_kernels
from penstock.runtime.formats.native.compiled import compiled_for

STRETCH = 1 << 20
"""Elements decoded at once: each takes 4 bytes meanwhile."""


@dataclass(frozen=True)
class Fp8:
    """Leaves ``weight`` [rows, columns] in E4M3 and ``weight_scale``: decoded to F32, multiplied, rounded once.

    transformers' ``Fp8Dequantize`` and compressed-tensors' ``dequantize`` give the same bits: with a scale in BF16 or F16 the product is
    exact in F32, whichever of them rounds.
    """

    block: tuple[int, int]
    """Rows and columns that share a scale; 0 is all of them."""

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        kernels = fp8_kernels(out.device)
        if kernels is not None:
            kernels.decode(self.on_card(parts), out)
            return
        weight, (rows, columns) = parts["weight"], out.shape
        tall, wide = self.block[0] or rows, self.block[1] or columns
        scale = parts["weight_scale"].reshape(-(-rows // tall), -(-columns // wide)).float()
        decode = compiled_for("fp8_decode", out, torch.bfloat16)
        if decode is not None:
            decode(weight, scale.contiguous(), out, rows, columns, tall, wide)
            return
        across = scale if scale.shape[1] == 1 else scale.repeat_interleave(wide, 1)[:, :columns]
        step = tall if 1 < tall < rows else max(1, STRETCH // columns)
        for first in range(0, rows, step):
            stretch = slice(first, min(first + step, rows))
            out[stretch] = weight[stretch].float().mul_(across[stretch] if tall == 1 else across[first // tall])

    def linear(self, x: torch.Tensor, parts: Parts, bias: torch.Tensor | None) -> torch.Tensor | None:
        kernels = fp8_kernels(x.device)
        return None if kernels is None else kernels.linear(x, self.on_card(parts), bias)

    def grouped(self, parts: Parts, bias: torch.Tensor | None) -> Fp8Matrix | None:
        return self.on_card(parts) if bias is None else None

    def experts(self, x: torch.Tensor, matrices: Sequence[Fp8Matrix]) -> torch.Tensor | None:
        kernels = fp8_kernels(x.device)
        return None if kernels is None else kernels.experts(x, matrices)

    def tabled(self, x: torch.Tensor, matrix: Fp8Matrix, table: torch.Tensor) -> torch.Tensor | None:
        kernels = fp8_kernels(x.device)
        return None if kernels is None else kernels.tabled(x, matrix, table)

    def on_card(self, parts: Parts) -> Fp8Matrix:
        """As kernels take it."""
        return Fp8Matrix(parts["weight"].view(torch.uint8), parts["weight_scale"], *self.block)

"""GPTQ: integers of 4 or 8 bits, packed along the input's dimension."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.runtime.formats.coding import Parts
from penstock.runtime.formats.kernels.on_card import whole_kernels
from penstock.runtime.formats.whole_numbers import Layout, Zeros, codes, decode_compiled, put, stretches


@dataclass(frozen=True)
class Gptq:
    """Leaves, of a matrix [rows, columns] in groups of columns.

        qweight  I32 [columns * bits / 32, rows], the lowest bits first
        scales   [groups, rows], in F16 as published
        qzeros   I32 [groups, rows * bits / 32]: zero points; ``qzeros_less_one`` where they are stored less one, as the first version does
        g_idx    I32 [columns]: the group of each column; without it groups follow each other

    (number - zero point) * scale in the scale's dtype, as AutoGPTQ, gptqmodel and auto-round compute it. A zero point of 0 is stored as
    2^bits - 1 where it is stored less one. Decoding takes 12 bytes an element of a stretch.
    """

    bits: int
    group: int
    """Columns; 0 is all of them."""

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        rows, columns = out.shape
        stored, order = parts.get("qzeros"), parts.get("g_idx")
        if order is None and self.group and columns % self.group:
            order = torch.arange(columns, device=out.device, dtype=torch.int32) // self.group
        kernels, zeros = whole_kernels(out.device), parts["qzeros_less_one"] if stored is None else stored
        if kernels is not None:
            words, scales = parts["qweight"].t(), parts["scales"].t()
            kernels.decode(words, scales, zeros.t(), order, out, bits=self.bits, less_one=stored is None)
            return
        kind = Zeros.less_one if stored is None else Zeros.in_words
        if decode_compiled(parts["qweight"], parts["scales"], zeros, order, out, bits=self.bits, layout=Layout.down, zero=kind):
            return
        scale, zero = parts["scales"].t().contiguous(), codes(zeros, self.bits).t()
        if stored is None:
            zero = (zero.to(torch.int16) + 1) & (1 << self.bits) - 1
        for stretch in stretches(rows, columns, out.device):
            numbers = codes(parts["qweight"][:, stretch].t().contiguous(), self.bits)
            put(numbers, zero[stretch], scale[stretch], order, out[stretch])

    def linear(self, x: torch.Tensor, parts: Parts, bias: torch.Tensor | None) -> torch.Tensor | None:
        kernels, stored, columns = whole_kernels(x.device), parts.get("qzeros"), x.shape[1]
        if kernels is None or (self.group and columns % self.group):
            return None
        zeros = parts["qzeros_less_one"] if stored is None else stored
        words, scales, rows = parts["qweight"].t(), parts["scales"].t(), parts["scales"].shape[1]
        order = parts.get("g_idx")
        return kernels.product_of_any(x.contiguous(), words, scales, zeros.t(), order, bias, rows, bits=self.bits, less_one=stored is None)

"""AWQ in the order of its GEMM kernel: integers of 4 bits, packed along the output's dimension."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.runtime.formats.coding import Parts
from penstock.runtime.formats.kernels.on_card import whole_kernels
from penstock.runtime.formats.whole_numbers import Layout, Zeros, codes, decode_compiled, put, stretches

LANES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Row of 8 -> which 4 bits of a word hold it, the lowest first."""


@dataclass(frozen=True)
class Awq:
    """Leaves, of a matrix [rows, columns] in groups of columns.

        qweight  I32 [columns, rows / 8]
        qzeros   I32 [groups, rows / 8]
        scales   [groups, rows], in F16 as published

    (number - zero point) * scale in the scale's dtype, as ``dequantize_gemm`` of AutoAWQ. Decoding takes 12 bytes an element of a stretch.
    """

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        rows, columns = out.shape
        kernels = whole_kernels(out.device)
        if kernels is not None:
            words, scales, zeros = (parts[leaf].t() for leaf in ("qweight", "scales", "qzeros"))
            kernels.decode(words, scales, zeros, None, out, bits=4, by_rows=True, awq=True)
            return
        words, scales, zeros = (parts[leaf] for leaf in ("qweight", "scales", "qzeros"))
        if columns % 8 == 0 and decode_compiled(words, scales, zeros, None, out, bits=4, layout=Layout.awq, zero=Zeros.in_words):
            return
        scale, zero = parts["scales"].t().contiguous(), rows_of(parts["qzeros"])
        for stretch in stretches(rows, columns, out.device):
            words = parts["qweight"][:, stretch.start // 8 : -(-stretch.stop // 8)]
            put(rows_of(words), zero[stretch], scale[stretch], None, out[stretch])

    def linear(self, x: torch.Tensor, parts: Parts, bias: torch.Tensor | None) -> torch.Tensor | None:
        """None: 14336 x 4096 from words in AWQ's order took an H100 725 to 938 us, decoding and the ordinary product 112."""
        return None


def rows_of(words: torch.Tensor) -> torch.Tensor:
    """[n, rows / 8] in words -> [rows, n] in bytes."""
    lanes = codes(words.t().contiguous(), 4).view(words.shape[1], -1, 8)
    return lanes[..., LANES].permute(0, 2, 1).reshape(8 * words.shape[1], -1)

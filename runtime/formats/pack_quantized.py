"""Integers of compressed-tensors, in 4 or 8 bits with a scale for each group of columns: pack-quantized, and int-quantized in 8 bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.runtime.formats.coding import Parts
from penstock.runtime.formats.kernels.on_card import whole_kernels
from penstock.runtime.formats.whole_numbers import Layout, Zeros, codes, decode_compiled, put, stretches

_SYMMETRIC = frozenset({"weight", "weight_scale"})


@dataclass(frozen=True)
class PackQuantized:
    """Leaves, of a matrix [rows, columns] in groups of columns.

        weight_packed      I32 [rows, columns * bits / 32]: number + 2^(bits - 1), the lowest bits first; or ``weight``, I8 [rows, columns]
        weight_scale       [rows, groups], [rows] or [1], in any float
        weight_zero_point  I32 [rows * bits / 32, groups], packed along rows as the numbers are; I8 [rows, groups] beside ``weight``
        weight_g_idx       I32 [columns]: the group of each column, -1 where groups follow each other

    As ``dequantize`` of compressed-tensors 0.20: (number - zero point) * scale in the scale's dtype. Decoding takes 8 bytes an element of a
    stretch.
    """

    bits: int

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
        rows, columns = out.shape
        scale = parts["weight_scale"]
        scale = scale.reshape(rows, -1) if scale.numel() >= rows else scale.reshape(1, 1).expand(rows, 1)
        packed, plain = parts.get("weight_packed"), parts.get("weight")
        middle = 0 if packed is None else 1 << self.bits - 1
        kernels = whole_kernels(out.device)
        if kernels is not None and packed is not None:
            zeros = parts.get("weight_zero_point")
            kernels.decode(packed, scale, zeros, parts.get("weight_g_idx"), out, bits=self.bits)
            return
        if kernels is not None and plain is not None and parts.keys() <= _SYMMETRIC and _in_words(columns, scale):
            kernels.decode(plain.view(torch.int32), scale, None, None, out, bits=8, signed=True)
            return
        if self._compiled(parts, out):
            return
        zero = self._zero(parts, scale.shape, middle)
        order = parts.get("weight_g_idx")
        for stretch in stretches(rows, columns, out.device):
            numbers = codes(packed[stretch], self.bits)[:, :columns] if packed is not None else plain[stretch]  # type: ignore[index]
            put(numbers, zero if isinstance(zero, int) else zero[stretch], scale[stretch], order, out[stretch])

    def _compiled(self, parts: Parts, out: torch.Tensor) -> bool:
        packed, zeros = parts.get("weight_packed"), parts.get("weight_zero_point")
        zero = Zeros.middle if zeros is None else Zeros.in_words if zeros.dtype == torch.int32 else Zeros.signed
        words, layout = (parts["weight"], Layout.signed) if packed is None else (packed, Layout.by_columns)
        order = parts.get("weight_g_idx")
        return decode_compiled(words, parts["weight_scale"], zeros, order, out, bits=self.bits, layout=layout, zero=zero)

    def _zero(self, parts: Parts, shape: torch.Size, middle: int) -> torch.Tensor | int:
        """What is subtracted, of ``shape`` [rows, groups] and with the ``middle`` that packed numbers have added."""
        stored = parts.get("weight_zero_point")
        if stored is None:
            return middle
        if stored.dtype == torch.int32:
            return codes(stored.t().contiguous(), self.bits)[:, : shape[0]].t()
        return stored.reshape(shape).to(torch.int16) + middle

    def linear(self, x: torch.Tensor, parts: Parts, bias: torch.Tensor | None) -> torch.Tensor | None:
        kernels, scale, packed = whole_kernels(x.device), parts["weight_scale"], parts.get("weight_packed")
        zeros, order = parts.get("weight_zero_point"), parts.get("weight_g_idx")
        if kernels is None or (packed is None and (zeros is not None or x.shape[1] % 4)):
            return None
        words = parts["weight"].view(torch.int32) if packed is None else packed
        rows, width = words.shape
        if scale.numel() < rows or width * 32 != x.shape[1] * self.bits:
            return None
        grid, x = scale.view(rows, -1), x.contiguous()
        if order is None and scale.dtype == x.dtype and width % grid.shape[1] == 0:
            return kernels.product(x, words, grid, zeros, bias, bits=self.bits, signed=packed is None)
        return None if packed is None else kernels.product_of_any(x, words, grid, zeros, order, bias, rows, bits=self.bits)

    def joined(self, x: torch.Tensor, matrices: Sequence[Parts]) -> torch.Tensor | None:
        kernels, given = whole_kernels(x.device), []
        if kernels is None or kernels.tiles is None or self.bits != 4:
            return None
        for parts in matrices:
            words, scale = parts.get("weight_packed"), parts["weight_scale"]
            if words is None or "weight_g_idx" in parts or words.shape[1] * 8 != x.shape[1] or scale.numel() < len(words):
                return None
            given.append((words, scale.view(len(words), -1), parts.get("weight_zero_point")))
        return kernels.tiles.joined(x.contiguous(), given)


def _in_words(columns: int, scale: torch.Tensor) -> bool:
    """Whether bytes of so many columns are whole words of 32 bits, each of one group."""
    groups = scale.shape[1]
    return scale.stride(1) == 1 and columns % groups == 0 and columns // groups % 4 == 0

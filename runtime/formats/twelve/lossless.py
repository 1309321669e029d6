"""BF16 in 12 bits without loss: sign and mantissa as they are, exponents as codes of 4 bits, and aside what has another exponent."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.runtime.formats.kernels.on_card import lossless_kernels
from penstock.runtime.formats.native.compiled import compiled_for

GROUP = 128
"""Numbers whose codes lie together: byte i of 64 has the code of number i in its low half, that of number 64 + i in its high half."""
CODES = 15
"""Exponents with a code. The last code, 15, says that the number is an escape."""
STRETCH = 1 << 13
"""Groups that torch decodes at once: 1 Mi numbers, 8 bytes each meanwhile."""


class Lossless:
    """Leaves of a matrix of ``rows * columns`` numbers, a multiple of 128, which lie row by row:

        low        uint8 [rows, columns]         the sign as the highest bit, then the mantissa
        codes      uint8 [rows * columns / 128, 64]
        exponents  uint8 [16]                    of each code; the last is unused
        at         int32 [escapes]               places of the escapes, at least one
        values     bfloat16 [escapes]            what is there

    A place may be named twice, with the same number. One that lies outside is left out: a store's are checked when it is opened, but a
    rehearsal decodes whatever lies in memory. Decoding gives back every bit; it takes no memory, and without a compiler 8 MiB.
    """

    def decode(self, parts: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        kernels = lossless_kernels(out.device)
        if kernels is not None:
            kernels.decode(parts, out)
            return
        low, codes, exponents, at, values = (parts[leaf] for leaf in ("low", "codes", "exponents", "at", "values"))
        decode = compiled_for("lossless_decode", out, torch.bfloat16)
        if decode is not None:
            decode(low, codes, exponents, at, values, out, len(codes), len(at))
            return
        _decode(low.view(-1, GROUP), codes, exponents, out.view(-1, GROUP))
        inside = (at >= 0) & (at < out.numel())
        out.view(-1)[at[inside].long()] = values[inside]

    def linear(self, x: torch.Tensor, parts: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor | None:
        return None


def _decode(low: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, out: torch.Tensor) -> None:
    shifted = exponents.to(torch.int16) << 7
    for first in range(0, len(codes), STRETCH):
        part = slice(first, first + STRETCH)
        found = shifted[torch.cat((codes[part] & 15, codes[part] >> 4), 1).int()]
        byte = low[part].to(torch.int16)
        out[part] = (((byte & 128) << 8) | found | (byte & 127)).view(torch.bfloat16)

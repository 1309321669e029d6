"""BF16 in 12 bits without loss: sign and mantissa as they are, exponents as codes of 4 bits, and aside what has another exponent."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.runtime.formats.coding import Parts
from penstock.runtime.formats.kernels.on_card import lossless_kernels
from penstock.runtime.formats.native.compiled import compiled, compiled_for

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

    def decode(self, parts: Parts, out: torch.Tensor) -> None:
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

    def linear(self, x: torch.Tensor, parts: Parts, bias: torch.Tensor | None) -> torch.Tensor | None:
        return None


def _decode(low: torch.Tensor, codes: torch.Tensor, exponents: torch.Tensor, out: torch.Tensor) -> None:
    shifted = exponents.to(torch.int16) << 7
    for first in range(0, len(codes), STRETCH):
        part = slice(first, first + STRETCH)
        found = shifted[torch.cat((codes[part] & 15, codes[part] >> 4), 1).int()]
        byte = low[part].to(torch.int16)
        out[part] = (((byte & 128) << 8) | found | (byte & 127)).view(torch.bfloat16)


def count_exponents(numbers: torch.Tensor) -> torch.Tensor:
    """[256]: how often each exponent occurs among ``numbers``, BF16 on the CPU, contiguous."""
    counts, count = torch.zeros(256, dtype=torch.int64), compiled("lossless_count")
    if count is not None:
        count(numbers, counts, numbers.numel())
        return counts
    for part in numbers.view(-1).view(torch.int16).split(STRETCH * GROUP):
        counts += torch.bincount(part.int() >> 7 & 255, minlength=256)
    return counts


def codebook(counts: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The exponents [16] that get codes, by how often each occurs, and how many numbers are escapes."""
    usual = counts.argsort(descending=True, stable=True)[:CODES].sort().values
    return torch.cat((usual, usual[:1])).to(torch.uint8), int(counts.sum() - counts[usual].sum())


def encode(numbers: torch.Tensor, exponents: torch.Tensor, room: int) -> Mapping[str, torch.Tensor]:
    """The leaves of ``numbers`` [rows, columns], BF16 on the CPU, contiguous, with room for ``room`` escapes, at least one and as many as
    there are. What is left over of it names the first number again. Takes 1.5 bytes a number, without a compiler 16."""
    low = torch.empty(numbers.shape, dtype=torch.uint8)
    codes = torch.empty((numbers.numel() // GROUP, GROUP // 2), dtype=torch.uint8)
    at = torch.zeros(room, dtype=torch.int32)
    values = numbers.reshape(-1)[:1].repeat(room)
    encode_all = compiled("lossless_encode")
    if encode_all is not None:
        found = encode_all(numbers, exponents, low, codes, at, values, len(codes), room)
    else:
        found = _encode(numbers, exponents, low, codes, at, values)
    if found > room:
        raise ValueError(f"{found} escapes and room for {room}")
    return {"low": low, "codes": codes, "exponents": exponents, "at": at, "values": values}


def _encode(
    numbers: torch.Tensor, exponents: torch.Tensor, low: torch.Tensor, codes: torch.Tensor, at: torch.Tensor, values: torch.Tensor
) -> int:
    bits = numbers.view(torch.int16).view(-1, GROUP).int() & 0xFFFF
    code_of = torch.full((256,), CODES, dtype=torch.uint8)
    code_of[exponents[:CODES].flip(0).long()] = torch.arange(CODES - 1, -1, -1, dtype=torch.uint8)
    code = code_of[bits >> 7 & 255]
    low.view(-1, GROUP).copy_((bits >> 8 & 128) | (bits & 127))
    codes.copy_(code[:, : GROUP // 2] | code[:, GROUP // 2 :] << 4)
    places = (code.view(-1) == CODES).nonzero()[:, 0]
    kept = places[: len(at)]
    at[: len(kept)], values[: len(kept)] = kept.int(), numbers.reshape(-1)[kept]
    return len(places)

"""The lossless form of BF16 in Triton: all numbers of a matrix by their codes, then the escapes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from penstock.runtime.formats.kernels.launching import Launcher

_GROUPS = 32
"""Of 128 numbers, in one program."""
_ESCAPES = 1024
"""In one program."""


@triton.jit(do_not_specialize=["groups"])
def _decode(low, codes, exponents, out, groups, GROUPS: tl.constexpr):
    """Some groups. The 15 exponents lie in four words, so that no memory is read for each number."""
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    place, inside = tl.arange(0, 64)[None, :], (group < groups)[:, None]
    both = tl.load(codes + group[:, None] * 64 + place, inside, 0).to(tl.int32)
    first, second = tl.load(exponents), tl.load(exponents + 1)
    third, fourth = tl.load(exponents + 2), tl.load(exponents + 3)
    for half in tl.static_range(2):
        code = (both >> (4 * half)) & 15
        at = group[:, None] * 128 + half * 64 + place
        byte = tl.load(low + at, inside, 0).to(tl.int32)
        word = tl.where(code < 8, tl.where(code < 4, first, second), tl.where(code < 12, third, fourth))
        exponent = (word >> ((code & 3) * 8)) & 255
        tl.store(out + at, (((byte & 128) << 8) | (exponent << 7) | (byte & 127)).to(tl.int16), inside)


@triton.jit(do_not_specialize=["escapes", "numbers"])
def _put(at, values, out, escapes, numbers, ESCAPES: tl.constexpr):
    """Some escapes; one whose place lies outside is left out."""
    here = tl.program_id(0) * ESCAPES + tl.arange(0, ESCAPES)
    place = tl.load(at + here, here < escapes, -1)
    tl.store(out + place, tl.load(values + here, here < escapes, 0), (place >= 0) & (place < numbers))


class LosslessKernels:
    """Decoding on a card. Costs nothing beside the result."""

    def __init__(self) -> None:
        self._decode = Launcher(_decode)
        self._put = Launcher(_put)

    def decode(self, parts: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        """``out`` is BF16 and contiguous; leaves begin at multiples of 16 bytes."""
        codes, at, bits = parts["codes"], parts["at"], out.view(torch.int16)
        self._decode(
            (triton.cdiv(len(codes), _GROUPS),),
            parts["low"],
            codes,
            parts["exponents"].view(torch.int32),
            bits,
            len(codes),
            GROUPS=_GROUPS,
            num_warps=4,
        )
        self._put((triton.cdiv(len(at), _ESCAPES),), at, parts["values"].view(torch.int16), bits, len(at), out.numel(), ESCAPES=_ESCAPES)

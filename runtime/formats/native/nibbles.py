"""Groups of 4-bit numbers decoded in C."""

from __future__ import annotations

import torch

from penstock.runtime.formats.native.compiled import compiled

_KINDS = (torch.bfloat16, torch.float16)
"""What nibbles.c writes, in its order."""


def decode_nibbles(codes: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> bool:
    """Write ``values[code] * scale``, rounded once, into ``out`` [rows, columns], contiguous, and say so; False where torch has to: on a
    card, in F32, without a compiler.

    ``codes``: two in each byte, the lower half first, in the order of ``out``. ``values`` [16] in F32. ``scales``, in row-major order, have
    one number for every so many columns that follow each other; in another dtype than F32 they take 4 bytes each meanwhile.
    """
    decode = compiled("nibbles_decode") if out.device.type == "cpu" and out.dtype in _KINDS else None
    group = out.numel() // scales.numel()
    if decode is None or group % 2 or codes.nbytes * 2 != out.numel():
        return False
    decode(codes, values, scales.float().contiguous(), out, scales.numel(), group, _KINDS.index(out.dtype))
    return True

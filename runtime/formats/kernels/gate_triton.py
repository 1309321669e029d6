"""gpt-oss's gate in Triton: what the model computes in seven kernels, in one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.runtime.formats.kernels.launching import Launcher

_WIDTH = 1024


@triton.jit
def _gated(both, out, width, ALPHA: tl.constexpr, LIMIT: tl.constexpr, WIDTH: tl.constexpr):
    """Some of a row's pairs of gate and up: (min(up, limit) + 1) * gate * sigmoid(alpha * gate)."""
    row, at = tl.program_id(0), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = at < width
    pair = both + row * (2 * width) + 2 * at
    gate, up = tl.load(pair, inside, 0.0).to(tl.float32), tl.load(pair + 1, inside, 0.0).to(tl.float32)
    gate, up = tl.minimum(gate, LIMIT), tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
    tl.store(out + row * width + at, ((up + 1.0) * gate * tl.sigmoid(ALPHA * gate)).to(out.dtype.element_ty), inside)


class ClampedGate:
    """With the model's constants. In F32, rounded once."""

    def __init__(self, alpha: float, limit: float):
        self._alpha, self._limit = alpha, limit
        self._gated = Launcher(_gated)

    def __call__(self, both: torch.Tensor) -> torch.Tensor:
        """[rows, 2 * width], gate and up side by side -> [rows, width]."""
        rows, width = both.shape[0], both.shape[1] // 2
        out = both.new_empty(rows, width)
        self._gated((rows, triton.cdiv(width, _WIDTH)), both, out, width, ALPHA=self._alpha, LIMIT=self._limit, WIDTH=_WIDTH)
        return out

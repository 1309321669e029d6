"""In Triton, what no format has a say in: products of one row with several experts' plain matrices, and experts copied to one place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.runtime.formats.kernels.launching import Launcher
from penstock.runtime.formats.kernels.places_triton import PLACE

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _one_row(
    memory, table, inputs, bias, out, rows, columns, inputs_stride, down, along,
    PLACE: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Some rows of one expert's matrix times one row of input. Experts' places are read from ``table``. Numbers of a column are ``down``
    apart, those of a row ``along``."""
    expert = tl.program_id(1)
    behind = tl.load(table + expert) * PLACE
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    stays = row < rows
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        here = column < columns
        place = row[:, None].to(tl.int64) * down + column[None, :].to(tl.int64) * along
        number = tl.load(memory + behind + place, stays[:, None] & here[None, :], 0.0).to(tl.float32)
        total += number * tl.load(inputs + expert * inputs_stride + column, here, 0.0).to(tl.float32)[None, :]
    made = tl.sum(total, 1)
    if BIAS:
        made += tl.load(bias + behind + row, stays, 0.0).to(tl.float32)
    tl.store(out + expert * rows + row, made.to(out.dtype.element_ty), stays)


@triton.jit
def _gather(memory, table, out, words, PLACE: tl.constexpr, WORDS: tl.constexpr):
    """Some words of one expert."""
    expert = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    held = tl.load(memory + tl.load(table + expert) * PLACE + at, at < words)
    tl.store(out + expert * words + at, held, at < words)


class PlainKernels:
    """Numbers as they are; sums in F32. Costs nothing beside the results."""

    def __init__(self) -> None:
        self._one_row, self._gather = Launcher(_one_row), Launcher(_gather)

    def tabled(
        self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None, table: torch.Tensor, turned: bool
    ) -> torch.Tensor | None:
        """``x`` [1 or experts, columns] -> [experts, rows], by matrices that lie as ``matrix`` [rows, columns] does, or [columns, rows]
        where it is ``turned``; ``bias`` [rows] lies beside it. In units of 256 bytes they begin as far behind it as ``table`` says, int64
        [experts] on the card. None for other types than those of ``x``, BF16, F16 and F32."""
        if x.dtype not in _TYPES or matrix.dtype is not x.dtype or (bias is not None and bias.dtype is not x.dtype):
            return None
        rows, columns = matrix.shape if not turned else (matrix.shape[1], matrix.shape[0])
        height, width = (128, 32) if turned else (4, 1024)
        out = x.new_empty(len(table), rows)
        self._one_row((triton.cdiv(rows, height), len(table)),
            matrix, table, x.contiguous(), out if bias is None else bias, out, rows, columns, 0 if len(x) == 1 else columns,
            1 if turned else columns, rows if turned else 1,
            PLACE=PLACE // x.dtype.itemsize, BIAS=bias is not None, ROWS=height, COLUMNS=width, num_warps=4,
        )  # fmt: skip
        return out

    def gather(self, memory: torch.Tensor, table: torch.Tensor, out: torch.Tensor) -> None:
        """Into ``out`` int64 [experts, words] as many words each from where ``table`` says behind ``memory``, int64."""
        words = out.shape[1]
        self._gather((triton.cdiv(words, 2048), len(table)), memory, table, out, words, PLACE=PLACE // 8, WORDS=2048, num_warps=8)

"""Whole numbers of 4 or 8 bits in 32-bit words, and the weights that they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum
from types import MappingProxyType

import torch

from penstock.runtime.formats.native.compiled import compiled_for

STRETCH = 1 << 18
"""Elements decoded at once on the CPU: each takes up to 8 bytes meanwhile, which stay in the core's own cache."""


class Layout(IntEnum):
    """How numbers lie, by the C decoder's numbers."""

    by_columns = 0
    """Words [rows, columns * bits / 32]."""
    down = 1
    """Words [columns * bits / 32, rows]."""
    awq = 2
    """Words [columns, rows / 8]."""
    signed = 3
    """Signed bytes [rows, columns]."""


class Zeros(IntEnum):
    """How zero points lie, by the C decoder's numbers."""

    middle = 0
    """None: half of all numbers is one."""
    in_words = 1
    less_one = 2
    signed = 3


_KINDS: Mapping[torch.dtype, int] = MappingProxyType({torch.bfloat16: 0, torch.float16: 1, torch.float32: 2})
_MOST_GROUPS = 4096


def decode_compiled(
    words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, order: torch.Tensor | None, out: torch.Tensor, *,
    bits: int, layout: Layout, zero: Zeros,
) -> bool:  # fmt: skip
    """Decode in C to the bits that :func:`put` gives, where ``out`` lies on the CPU, a compiler made the library, and it takes such parts:
    what lies as the file has it, in groups of equal size. ``scales`` are [rows, groups], or [groups, rows] of ``down`` and ``awq``."""
    decode = compiled_for("whole_decode", out, torch.bfloat16, torch.float16)
    rows, columns = out.shape
    groups = scales.numel() // rows
    if decode is None or groups == 0 or columns % groups or (order is not None and groups > _MOST_GROUPS) or scales.dtype not in _KINDS:
        return False
    if not all(part is None or part.is_contiguous() for part in (words, scales, zeros, order, out)):
        return False
    decode(
        words, scales, words if zeros is None else zeros, words if order is None else order, out, rows, columns, groups, bits, layout, zero,
        order is not None, _KINDS[scales.dtype], _KINDS[out.dtype],
    )  # fmt: skip
    return True


def codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[..., n] in 32-bit words -> [..., n * 32 / bits] in bytes: the lowest bits of a word come first. ``words`` is contiguous."""
    packed = words.reshape(-1).view(torch.uint8).view(*words.shape[:-1], -1)
    return packed if bits == 8 else torch.stack((packed & 15, packed >> 4), -1).flatten(-2)


def stretches(rows: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Ranges of rows to decode one after the other, each but the last a multiple of 8 rows. A card takes 16 times as many at once."""
    step = max(8, (STRETCH << (0 if device.type == "cpu" else 4)) // columns // 8 * 8)
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def put(numbers: torch.Tensor, zero: torch.Tensor | int, scale: torch.Tensor, group: torch.Tensor | None, out: torch.Tensor) -> None:
    """``out[r, c] = (numbers[r, c] - zero[r, g]) * scale[r, g]``, rounded to the scale's dtype, then to that of ``out``.

    ``numbers``, ``out``: [rows, columns]. ``zero``, ``scale``: [rows, groups]. g = ``group[c]``; groups follow each other where it is None.
    The difference is exact in every dtype, since it has 9 bits at most; so is the product before it is rounded. A negative group
    follows its neighbours; one that is not there counts as the last, since a rehearsal decodes whatever lay in memory.
    """
    value = out if out.dtype == scale.dtype else torch.empty(out.shape, dtype=scale.dtype, device=out.device)
    value.copy_(numbers)
    if group is None:
        grid, factor, less = value.view(len(value), scale.shape[1], -1), scale[..., None], zero
        less = less if isinstance(less, int) else less[..., None]
    else:
        following = torch.arange(len(group), device=out.device, dtype=group.dtype) // -(-len(group) // scale.shape[1])
        member = torch.where(group < 0, following, group.clamp(max=scale.shape[1] - 1))
        grid, factor, less = value, scale[:, member], zero if isinstance(zero, int) else zero[:, member]
    grid.sub_(less).mul_(factor)
    if value is not out:
        out.copy_(value)

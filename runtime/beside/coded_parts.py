"""Coded matrices as the products in C take them: which kind each format is, and its parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

import torch

from penstock.planner.contract.gguf.gguf_types import CODED, block_type
from penstock.planner.contract.given.formats import BITS, GROUPS
from penstock.runtime.formats.coding import Parts
from penstock.runtime.formats.twelve.lossless import GROUP

MOST_COLUMNS = 1 << 16
"""Of product_strips.h."""


class CodedParts(NamedTuple):
    """One matrix for the C function of ``kind``, whose file says which part is what."""

    kind: str
    rows: int
    columns: int
    group: int
    parts: tuple[torch.Tensor | None, ...]
    flags: tuple[bool, ...] = ()
    """Behind the parts: such as are there or not."""


_SCALES = (torch.bfloat16, torch.float16)


def _whole(tensors: Parts, bits: int) -> CodedParts | None:
    """Numbers of 4 or 8 bits as compressed-tensors stores them. None: scales in F32, one for all, named groups."""
    packed, scale, zeros = tensors.get("weight_packed"), tensors["weight_scale"], tensors.get("weight_zero_point")
    words = tensors["weight"] if packed is None else packed
    rows, columns = words.shape[0], words.shape[1] * (1 if packed is None else 32 // bits)
    groups = scale.numel() // rows
    if "weight_g_idx" in tensors or scale.dtype not in _SCALES or groups == 0 or columns % groups:
        return None
    kind = "INT8" if packed is None else f"{'U' if bits == 8 else ''}INT{bits}"
    return CodedParts(kind, rows, columns, columns // groups, (words, scale, zeros), (scale.dtype == torch.float16,))


def _turned(tensors: Parts, kind: str, numbers_a_row: int, group: int) -> CodedParts | None:
    """Numbers of 4 bits whose words lie across rows: GPTQ's, AWQ's. None: scales in F32, named groups, sizes that are no multiples."""
    words, scale = tensors["qweight"], tensors["scales"]
    stored = tensors.get("qzeros")
    groups, rows = scale.shape
    columns = words.shape[0] * numbers_a_row
    if "g_idx" in tensors or scale.dtype not in _SCALES or columns != groups * (group or columns) or columns % 8 or rows % 8:
        return None
    zeros = tensors["qzeros_less_one"] if stored is None else stored
    return CodedParts(kind, rows, columns, columns // groups, (words, scale, zeros), (scale.dtype == torch.float16, stored is None))


def _fp8(tensors: Parts, kind: str, group: int) -> CodedParts:
    weight = tensors["weight"]
    rows, columns = weight.shape
    return CodedParts(kind, rows, columns, group, (weight, tensors["weight_scale"].float().contiguous()))


def _mxfp4(tensors: Parts) -> CodedParts:
    rows, groups = tensors["scales"].shape
    return CodedParts("MXFP4", rows, groups * 32, 32, (tensors["blocks"], tensors["scales"]))


def _nvfp4(tensors: Parts) -> CodedParts | None:
    """None: rows of which some have another factor than the matrix that they belong to."""
    codes, scales, divides = tensors["weight"], tensors["weight_scale"], "divisor" in tensors
    factors = tensors["divisor" if divides else "factor"].reshape(-1)
    rows, groups = scales.shape
    return (
        None if rows % len(factors) else CodedParts("NVFP4", rows, groups * 16, rows // len(factors), (codes, scales, factors), (divides,))
    )


def _lossless(tensors: Parts) -> CodedParts | None:
    """None: rows that are no whole groups."""
    low, at = tensors["low"], tensors["at"]
    rows, columns = low.shape
    escapes = int(at.count_nonzero()) + (not int(at[0]))  # behind the last one room is left over, filled with zeros
    parts = (low, tensors["codes"], tensors["exponents"], at, tensors["values"])
    return None if columns % GROUP else CodedParts("lossless", rows, columns, escapes, parts)


def _blocks(tensors: Parts, kind: str) -> CodedParts:
    weight, block = tensors["weight"], block_type(kind)
    assert block is not None
    return CodedParts(kind, weight.shape[0], weight.shape[1] // block.nbytes * block.columns, block.columns, (weight,))


_ALL: dict[str, Callable[[Parts], CodedParts | None]] = {
    "FP8": partial(_fp8, kind="FP8", group=128),
    "FP8-row": partial(_fp8, kind="FP8-row", group=1),
    "FP8-tensor": partial(_fp8, kind="FP8-row", group=0),
    "MXFP4": _mxfp4,
    "NVFP4": _nvfp4,
    "lossless": _lossless,
    **{f"INT{b}-{size}{kind}": partial(_whole, bits=b) for b in BITS for size in ("row", *GROUPS) for kind in ("", "-asym")},
    **{f"GPTQ4-{group or 'row'}": partial(_turned, kind="GPTQ4", numbers_a_row=8, group=group) for group in (0, *GROUPS)},
    **{f"AWQ-{group or 'row'}": partial(_turned, kind="AWQ", numbers_a_row=1, group=group) for group in (0, *GROUPS)},
    **{block.name: partial(_blocks, kind=block.name) for block in CODED.values()},
}
PARTS_OF: Mapping[str, Callable[[Parts], CodedParts | None]] = MappingProxyType(_ALL)
"""By the name of a format. A function gives None for a variant that the C has no product for."""

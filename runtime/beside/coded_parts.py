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


def _whole(tensors: Parts, bits: int) -> CodedParts | None:
    """Numbers of 4 or 8 bits as compressed-tensors stores them. None: scales in other types than BF16, one for all, named groups."""
    packed, scale, zeros = tensors.get("weight_packed"), tensors["weight_scale"], tensors.get("weight_zero_point")
    words = tensors["weight"] if packed is None else packed
    rows, columns = words.shape[0], words.shape[1] * (1 if packed is None else 32 // bits)
    groups = scale.numel() // rows
    if "weight_g_idx" in tensors or scale.dtype != torch.bfloat16 or groups == 0 or columns % groups:
        return None
    return CodedParts(
        "INT8" if packed is None else f"{'U' if bits == 8 else ''}INT{bits}", rows, columns, columns // groups, (words, scale, zeros)
    )


def _fp8(tensors: Parts, kind: str, group: int) -> CodedParts:
    weight = tensors["weight"]
    rows, columns = weight.shape
    return CodedParts(kind, rows, columns, group, (weight, tensors["weight_scale"].float().contiguous()))


def _mxfp4(tensors: Parts) -> CodedParts:
    rows, groups = tensors["scales"].shape
    return CodedParts("MXFP4", rows, groups * 32, 32, (tensors["blocks"], tensors["scales"]))


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
    "lossless": _lossless,
    **{f"INT{b}-{size}{kind}": partial(_whole, bits=b) for b in BITS for size in ("row", *GROUPS) for kind in ("", "-asym")},
    **{block.name: partial(_blocks, kind=block.name) for block in CODED.values()},
}
PARTS_OF: Mapping[str, Callable[[Parts], CodedParts | None]] = MappingProxyType(_ALL)
"""By the name of a format. A function gives None for a variant that the C has no product for."""

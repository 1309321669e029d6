"""Random matrices in every coded format that the CPU multiplies as it is stored."""

from __future__ import annotations

import torch

from penstock.planner.contract.gguf.gguf_types import CODED, block_type
from penstock.runtime.formats.twelve.lossless_encoding import codebook, count_exponents, encode

_HALVES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where each block of a type has F16 numbers."""


def _bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def _scales(*shape: int) -> torch.Tensor:
    return torch.rand(shape) * 0.01 + 0.001


def _words(rows: int, columns: int) -> torch.Tensor:
    return _bytes(rows * columns * 4).view(torch.int32).view(rows, columns)


def _whole(rows: int, columns: int, bits: int, group: int, zeros: bool, packed: bool) -> dict[str, torch.Tensor]:
    groups = columns // (group or columns)
    found = {"weight_scale": _scales(rows, groups).bfloat16()}
    if packed:
        found["weight_packed"] = _words(rows, columns * bits // 32)
    else:
        found["weight"] = _bytes(rows, columns).view(torch.int8)
    if zeros:
        found["weight_zero_point"] = _words(-(-rows * bits // 32), groups) if packed else _bytes(rows, groups).view(torch.int8)
    return found


def _turned(rows: int, columns: int, group: int, kind: torch.dtype, awq: bool, less_one: bool) -> dict[str, torch.Tensor]:
    groups = columns // (group or columns)
    words = _words(columns, rows // 8) if awq else _words(columns // 8, rows)
    zeros = "qzeros_less_one" if less_one else "qzeros"
    return {"qweight": words, "scales": _scales(groups, rows).to(kind), zeros: _words(groups, rows // 8)}


def _nvfp4(rows: int, columns: int, divides: bool) -> dict[str, torch.Tensor]:
    scales = (torch.rand(rows, columns // 16) * 400).to(torch.float8_e4m3fn)
    factors = torch.rand(1 if rows % 2 else 2) + (100 if divides else 0.001)
    return {"weight": _bytes(rows, columns // 2), "weight_scale": scales, "divisor" if divides else "factor": factors}


def _e4m3(rows: int, columns: int) -> torch.Tensor:
    found = (torch.randn(rows, columns) * 50).to(torch.float8_e4m3fn)
    found.view(torch.uint8)[:, ::7] &= 0x87  # without a leading one
    return found


def _blocks(rows: int, columns: int, name: str) -> dict[str, torch.Tensor]:
    block = block_type(name)
    assert block is not None
    found = _bytes(rows, columns // block.columns, block.nbytes)
    for at in _HALVES[name]:
        found[:, :, at : at + 2] = _scales(*found.shape[:2]).half().view(torch.uint8).view(*found.shape[:2], 2)
    return {"weight": found.view(rows, -1)}


def _lossless(rows: int, columns: int) -> dict[str, torch.Tensor]:
    numbers = (torch.randn(rows, columns) * 0.02).bfloat16()
    numbers[0, 0], numbers[-1, -1], numbers[rows // 2, columns // 3 : columns // 3 + 3] = 1e9, 1e-20, -3e8
    exponents, escapes = codebook(count_exponents(numbers))
    return dict(encode(numbers, exponents, escapes + 5))


def coded_matrices(rows: int, columns: int) -> dict[str, tuple[str, dict[str, torch.Tensor]]]:
    """A name -> format and leaves, of those that ``columns`` allow."""
    found = {}
    for group in (32, 64, 128, 0):
        for zeros in (False, True):
            if not columns % (group or columns):
                size = f"{group or 'row'}{'-asym' if zeros else ''}"
                found[f"INT4-{size}"] = f"INT4-{size}", _whole(rows, columns, 4, group, zeros, True)
                for name in (f"INT4-{size}", f"INT8-{size}"):
                    parts = _whole(rows, columns, int(name[3]), group, zeros, "4" in name[:4])
                    found[f"{name} F16"] = name, parts | {"weight_scale": parts["weight_scale"].half()}
                found[f"INT8-{size}"] = f"INT8-{size}", _whole(rows, columns, 8, group, zeros, False)
                found[f"INT8-{size} packed"] = f"INT8-{size}", _whole(rows, columns, 8, group, zeros, True)
    for group in (32, 128, 0):
        if not columns % (group or columns) and rows % 8 == 0 and columns % 8 == 0:
            for kind in (torch.float16, torch.bfloat16):
                size = f"{group or 'row'}"
                found[f"AWQ-{size} {kind}"] = f"AWQ-{size}", _turned(rows, columns, group, kind, True, False)
                for less in (False, True):
                    found[f"GPTQ4-{size} {kind} {less}"] = f"GPTQ4-{size}", _turned(rows, columns, group, kind, False, less)
    if columns % 16 == 0:
        found |= {f"NVFP4 {divides}": ("NVFP4", _nvfp4(rows, columns, divides)) for divides in (False, True)}
    weight = _e4m3(rows, columns)
    found["FP8"] = "FP8", {"weight": weight, "weight_scale": _scales(-(-rows // 128), -(-columns // 128))}
    found["FP8-row"] = "FP8-row", {"weight": weight, "weight_scale": _scales(rows, 1).bfloat16()}
    found["FP8-tensor"] = "FP8-tensor", {"weight": weight, "weight_scale": _scales(1)}
    if columns % 32 == 0:
        scales = torch.randint(110, 130, (rows, columns // 32), dtype=torch.uint8)
        found["MXFP4"] = "MXFP4", {"blocks": _bytes(rows, columns // 32, 16), "scales": scales}
    if columns % 128 == 0:
        found["lossless"] = "lossless", _lossless(rows, columns)
    return found | {
        block.name: (block.name, _blocks(rows, columns, block.name)) for block in CODED.values() if columns % block.columns == 0
    }

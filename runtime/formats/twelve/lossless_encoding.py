"""Matrices in the lossless form: which exponents get codes, and the leaves."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from penstock.runtime.formats.native.compiled import compiled
from penstock.runtime.formats.twelve.lossless import CODES, GROUP, STRETCH


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

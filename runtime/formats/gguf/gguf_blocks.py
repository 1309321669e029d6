"""Blocks of GGUF files: 32 or 256 elements of a row with their scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from penstock.planner.contract.gguf.gguf_types import CODED
from penstock.runtime.formats.kernels.on_card import gguf_kernels
from penstock.runtime.formats.native.compiled import compiled_for

STRETCH = 1 << 18
"""Elements decoded at once, each through 9 bytes beside the result: they stay in a core's cache."""

Unpack = Callable[[torch.Tensor, torch.Tensor], None]
"""Write the values of blocks [blocks, bytes of one] into F32 [blocks, elements of one]."""


@dataclass(frozen=True)
class GgufBlocks:
    """Leaf ``weight``: [rows, bytes of a row] in blocks of the type ``name``.

    Values are computed in F32, every product and difference rounded, and rounded once more to the type of ``out``: bit for bit as the
    ``gguf`` package's ``dequantize`` and transformers' reading give them. Torch takes 9 bytes an element of ``STRETCH``.
    """

    name: str

    def decode(self, parts: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        weight = parts["weight"]
        kernels = gguf_kernels(weight.device)
        if kernels is not None:
            kernels.decode(self.name, weight, out)
            return
        number, block = next((number, block) for number, block in CODED.items() if block.name == self.name)
        compiled = compiled_for("gguf_decode", out, torch.bfloat16)
        if compiled is not None:
            compiled(weight, out, weight.numel() // block.nbytes, number)
            return
        blocks, flat = weight.reshape(-1, block.nbytes), out.view(-1, block.columns)
        step = max(1, STRETCH // block.columns)
        values = torch.empty((min(step, len(blocks)), block.columns), dtype=torch.float32, device=weight.device)
        for first in range(0, len(blocks), step):
            some = blocks[first : first + step]
            made = values[: len(some)]
            UNPACK[self.name](some, made)
            flat[first : first + len(some)] = made

    def linear(self, x: torch.Tensor, parts: Mapping[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor | None:
        kernels = gguf_kernels(x.device)
        return None if kernels is None else kernels.multiply(self.name, x, parts["weight"], bias)


def _halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """One F16 number of each block, as F32 [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _words(blocks: torch.Tensor, at: int, nbytes: int) -> torch.Tensor:
    """Bytes of each block, eight in a word: [blocks, words]."""
    return blocks[:, at : at + nbytes].contiguous().view(torch.int64)


def _codes(words: torch.Tensor, shift: int, bits: int, up: int = 0) -> torch.Tensor:
    """``bits`` bits of every byte from ``shift`` on, moved ``up``: words of bytes."""
    return ((words >> shift) & (0x0101010101010101 * ((1 << bits) - 1))) << up


def _q8_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    out.copy_(blocks[:, 2:].view(torch.int8)).mul_(_halves(blocks, 0))


def _q4_0(blocks: torch.Tensor, out: torch.Tensor) -> None:
    both, words = out.view(-1, 2, 16), _words(blocks, 2, 16)
    for half in range(2):
        both[:, half] = _codes(words, 4 * half, 4).view(torch.uint8)
    out.sub_(8).mul_(_halves(blocks, 0))


def _six_bits(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """12 bytes a block as eight scales and eight minima of 6 bits each, in F32 [blocks, 8]."""
    low, middle, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], dim=1)
    minima = torch.cat([middle & 63, (high >> 4) | ((middle >> 2) & 48)], dim=1)
    return scales.float(), minima.float()


def _scaled(blocks: torch.Tensor, out: torch.Tensor) -> None:
    """``out`` holds the codes of eight groups of 32: apply each group's scale and minimum."""
    scales, minima = _six_bits(blocks[:, 4:16])
    groups = out.view(-1, 8, 32)
    groups.mul_(scales.mul_(_halves(blocks, 0))[:, :, None]).sub_(minima.mul_(_halves(blocks, 2))[:, :, None])


def _q4_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    pairs, words = out.view(-1, 4, 2, 32), _words(blocks, 16, 128)
    for half in range(2):
        pairs[:, :, half] = _codes(words, 4 * half, 4).view(torch.uint8).view(-1, 4, 32)
    _scaled(blocks, out)


def _q5_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    groups, fifth, words = out.view(-1, 8, 32), _words(blocks, 16, 32), _words(blocks, 48, 128).view(-1, 4, 4)
    for g in range(8):
        groups[:, g] = (_codes(words[:, g // 2], 4 * (g % 2), 4) | _codes(fifth, g, 1, up=4)).view(torch.uint8)
    _scaled(blocks, out)


def _q6_k(blocks: torch.Tensor, out: torch.Tensor) -> None:
    groups, low, high = out.view(-1, 2, 4, 32), _words(blocks, 0, 128).view(-1, 2, 2, 4), _words(blocks, 128, 64).view(-1, 2, 4)
    for quarter in range(4):
        codes = _codes(low[:, :, quarter % 2], 4 * (quarter // 2), 4) | _codes(high, 2 * quarter, 2, up=4)
        groups[:, :, quarter] = codes.view(torch.uint8)
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float().mul_(_halves(blocks, 208))
    out.sub_(32).view(-1, 16, 16).mul_(scales[:, :, None])


UNPACK: Mapping[str, Unpack] = MappingProxyType({"Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k})
"""By the type's name."""

"""How GGUF files store numbers: ggml's types, by their number in a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class BlockType:
    """Rows of ``columns`` elements, which share scales, in ``nbytes`` bytes each; a block never spans two rows."""

    name: str
    columns: int
    nbytes: int

    def row_bytes(self, columns: int) -> int:
        """Of a row of so many elements, a multiple of a block's."""
        return columns // self.columns * self.nbytes


def _by_number(**blocks: tuple[int, int, int]) -> Mapping[int, BlockType]:
    return MappingProxyType({number: BlockType(name, columns, nbytes) for name, (number, columns, nbytes) in blocks.items()})


PLAIN: Mapping[int, BlockType] = _by_number(F32=(0, 1, 4), F16=(1, 1, 2), BF16=(30, 1, 2))
"""Numbers as they are, by safetensors' names."""

CODED: Mapping[int, BlockType] = _by_number(
    Q4_0=(2, 32, 18), Q8_0=(8, 32, 34), Q4_K=(12, 256, 144), Q5_K=(13, 256, 176), Q6_K=(14, 256, 210)
)
"""Blocks that are decoded here."""

READ: Mapping[int, BlockType] = MappingProxyType({**PLAIN, **CODED})

OTHERS: Mapping[int, str] = MappingProxyType(
    {
        3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
        19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
        29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
    }
)  # fmt: skip
"""Names of types that are refused."""


def type_name(number: int) -> str:
    """Of a type that is read or not."""
    found = READ.get(number)
    return found.name if found else OTHERS.get(number, f"number {number}")


def block_type(name: str) -> BlockType | None:
    """The coded type of this name."""
    return next((block for block in CODED.values() if block.name == name), None)

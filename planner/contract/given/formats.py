"""How a weight is stored, and the number that a model computes with. Values without torch: the planner counts bytes by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Dtype(StrEnum):
    """What a model computes in, or holds its KV in, by torch's name."""

    bfloat16 = "bfloat16"
    float16 = "float16"
    float32 = "float32"

    @property
    def nbytes(self) -> int:
        """Of one element."""
        return 4 if self is Dtype.float32 else 2


@dataclass(frozen=True)
class Format:
    """How a matrix of weights is stored. Links carry it and tiers hold it as stored: sent bytes and resident bytes are stored bytes."""

    name: str
    """As safetensors names the elements: ``BF16``, ``F32``."""
    element_bits: int
    plain: Dtype
    """What a product takes the stored elements for, as they are."""
    needs_scratch: bool = False
    """Whether a product decodes the matrix into memory of its own before it multiplies."""

    def stored_bytes(self, rows: int, columns: int) -> int:
        """Of a matrix, or of a vector with one row."""
        return rows * columns * self.element_bits // 8


FORMATS: Mapping[str, Format] = MappingProxyType(
    {
        "BF16": Format("BF16", 16, Dtype.bfloat16),
        "F16": Format("F16", 16, Dtype.float16),
        "F32": Format("F32", 32, Dtype.float32),
    }
)
"""Formats that a streamed unit may have, by name."""


def plain_format(dtype: Dtype) -> Format:
    """The format that stores ``dtype`` as it is."""
    return next(known for known in FORMATS.values() if known.plain is dtype)

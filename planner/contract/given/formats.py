"""How a weight is stored, and the number that a model computes with. Values without torch: the planner counts bytes by them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from penstock.planner.common.errors import UserError, nearest


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
    """As safetensors names the elements, ``BF16``, ``F32``; of a quantised one what it is called, ``FP8``, ``MXFP4``."""
    element_bits: int
    plain: Dtype
    """What a product takes the stored elements for, as they are; of a quantised format what they are decoded to."""
    needs_scratch: bool = False
    """Whether a product decodes the matrix into memory of its own before it multiplies."""
    block: tuple[int, int] = (1, 1)
    """Rows and columns that share scales; 0 is all of them."""
    block_bits: int = 0
    """Of the scales and zero points of one block."""
    column_bits: int = 0
    """Of what is stored for each column besides."""
    product_rows: int = 0
    """The most rows that a card multiplies by the matrix as it is stored; 0: it is always decoded first."""
    host_rows: int = 0
    """The same of a CPU that computes without a card."""
    grouped: bool = False
    """Whether a card multiplies by the matrices of several experts in one launch."""

    def stored_bytes(self, rows: int, columns: int) -> int:
        """Of a matrix, or of a vector with one row."""
        tall, wide = self.block[0] or rows, self.block[1] or columns
        blocks = -(-rows // tall) * -(-columns // wide)
        return (rows * columns * self.element_bits + blocks * self.block_bits + columns * self.column_bits) // 8


def _named(*formats: Format) -> Mapping[str, Format]:
    return MappingProxyType({known.name: known for known in formats})


FORMATS: Mapping[str, Format] = _named(
    Format("BF16", 16, Dtype.bfloat16),
    Format("F16", 16, Dtype.float16),
    Format("F32", 32, Dtype.float32),
)
"""Formats of weights as they are computed with, by name."""

PRODUCT_ROWS = 8
"""Up to so many rows a product that reads 4 or 8 bits a weight waits for memory and not for arithmetic."""
HOST_PRODUCT_ROWS = 16
"""Up to so many rows a CPU multiplies by a matrix as it is stored, where it has such a product: beyond, decoding once costs less."""
GROUPS = (32, 64, 128)
"""Columns that share a scale in formats of whole numbers; besides there is a scale for each row."""
BITS = (4, 8)
"""Of the whole numbers that are known."""

ESCAPES_APART = 4096
"""Numbers of a trained matrix of which one has an exponent without a code in the lossless form, about: of normally distributed ones one in
6600."""


def _quantised(name: str, bits: int, block: tuple[int, int], block_bits: int, host_rows: int = HOST_PRODUCT_ROWS) -> Format:
    return Format(name, bits, Dtype.bfloat16, True, block, block_bits, 0, PRODUCT_ROWS, host_rows)


def _whole(name: str, bits: int, group: int, zero_bits: int = 0, column_bits: int = 0, host_rows: int = 0) -> Format:
    """Whole numbers in groups of columns, or of whole rows where ``group`` is 0."""
    return Format(name, bits, Dtype.bfloat16, True, (1, group), 16 + zero_bits, column_bits, PRODUCT_ROWS, host_rows)


_SIZES = {"row": 0} | {str(group): group for group in GROUPS}

QUANTISED: Mapping[str, Format] = _named(
    *(
        replace(one, grouped=True)
        for one in (
            _quantised("FP8", 8, (128, 128), 32),
            _quantised("FP8-row", 8, (1, 0), 32),
            _quantised("FP8-tensor", 8, (0, 0), 32),
            _quantised("MXFP4", 4, (1, 32), 8),
            _quantised("NVFP4", 4, (1, 16), 8),
        )
    ),
    *(_whole(f"INT{b}-{name}", b, group, 0, 0, HOST_PRODUCT_ROWS) for b in BITS for name, group in _SIZES.items()),
    *(_whole(f"INT{b}-{name}-asym", b, group, b, 0, HOST_PRODUCT_ROWS) for b in BITS for name, group in _SIZES.items()),
    *(_whole(f"GPTQ{b}-{name}", b, group, b, 0, HOST_PRODUCT_ROWS if b == 4 else 0) for b in BITS for name, group in _SIZES.items()),
    *(_whole(f"GPTQ{b}-{group}-order", b, group, b, 32) for b in BITS for group in GROUPS),
    *(replace(_whole(f"AWQ-{name}", 4, group, 4, 0, HOST_PRODUCT_ROWS), product_rows=0) for name, group in _SIZES.items()),
    _quantised("Q4_0", 4, (1, 32), 16),
    _quantised("Q8_0", 8, (1, 32), 16),
    _quantised("Q4_K", 4, (1, 256), 128),
    _quantised("Q5_K", 5, (1, 256), 128),
    _quantised("Q6_K", 6, (1, 256), 144),
    Format("lossless", 12, Dtype.bfloat16, needs_scratch=True, block=(1, ESCAPES_APART), block_bits=48),
)
"""Coded formats, by name:

    FP8                 E4M3, a F32 scale for each block of 128 x 128 (DeepSeek-V3); -row, -tensor: for each row, for all
    MXFP4               E2M1, an E8M0 scale for 32 columns (OCP Microscaling 1.0)
    NVFP4               E2M1, an E4M3 scale for 16 columns; the one scale of a tensor is left out
    INT4-..., INT8-...  compressed-tensors: a 16-bit scale for a group of 32, 64 or 128 columns, or for a row; -asym: and a zero point
    GPTQ4-, GPTQ8-...   a 16-bit scale and a zero point a group; -order: and each column's group in 32 bits
    AWQ-...             4 bits, a 16-bit scale and a zero point a group
    Q4_0, Q8_0          GGUF, an F16 scale for 32 columns
    Q4_K, Q5_K, Q6_K    GGUF, for 256 columns F16 scales, and of each 32 or 16 of them scales of 6 or 8 bits
    lossless            BF16 in 12 bits, to the bit: sign, mantissa and a code of the exponent; 48 bits for each number without a code
"""

KNOWN_FORMATS: Mapping[str, Format] = MappingProxyType({**FORMATS, **QUANTISED})
"""Formats that a unit of a plan may have, by name."""


def in_rows(form: Format) -> Format | None:
    """What `runtime pack format=rows` makes of ``form``, whose numbers lie in another order than rows; None for others, and for groups
    that columns name."""
    found = re.fullmatch(r"(?:AWQ|GPTQ([48]))(-\w+)", form.name)
    return None if found is None else KNOWN_FORMATS[f"INT{found[1] or 4}{found[2]}-asym"]


def no_such_format(where: str, name: object) -> UserError:
    """The error of ``where``, a key naming the format ``name``, which there is not: the variants of its family, else all families."""
    families: dict[str, list[str]] = {}
    for known in KNOWN_FORMATS:
        families.setdefault(known.split("-")[0], []).append(known)
    variants = families.get(str(name).split("-")[0].upper())
    allowed = variants or [first if known == [first] else f"{first}-..." for first, known in families.items()]
    return UserError(f"{where}: no such format of weights; choose of {', '.join(allowed)}{nearest(str(name), variants or KNOWN_FORMATS)}")


def plain_format(dtype: Dtype) -> Format:
    """The format that stores ``dtype`` as it is."""
    return next(known for known in FORMATS.values() if known.plain is dtype)

"""BF16 in 12 bits, which `runtime pack format=lossless` writes: matrices as codes of exponents, and what has no code."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.contract.given.formats import QUANTISED, Format
from penstock.planner.contract.stored.scheme import Converted
from penstock.planner.contract.stored.stored_matrix import Leaf, StoredMatrix

LOSSLESS = QUANTISED["lossless"]
METHOD = "lossless"
"""Its quant_method in the config.json of a packed store."""
LEAVES = ("low", "codes", "exponents", "at", "values")
"""In the order in which they are stored."""
GROUP = 128
"""A matrix has a multiple of so many numbers."""
_PREFIX = "lossless_"
_MOST = 2**31
"""Numbers of a matrix are below it, since 32 bits name an escape's place."""
_ANYTHING = "pack the checkpoint again"


def tensor_name(matrix: str, leaf: str) -> str:
    """What a store calls the ``leaf`` of the tensor ``matrix``."""
    return f"{matrix}.{_PREFIX}{leaf}"


def leaf_shapes(shape: tuple[int, ...], escapes: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Leaf -> (dtype, shape) of a matrix (rows, columns), or of (experts, rows, columns), with ``escapes`` each."""
    *outer, rows, columns = shape
    sizes = {
        "low": ("U8", (rows, columns)),
        "codes": ("U8", (rows * columns // GROUP, GROUP // 2)),
        "exponents": ("U8", (16,)),
        "at": ("I32", (escapes,)),
        "values": ("BF16", (escapes,)),
    }
    return {leaf: (dtype, (*outer, *inner)) for leaf, (dtype, inner) in sizes.items()}


def can_be_coded(shape: tuple[int, ...]) -> bool:
    """Whether matrices of ``shape`` have a lossless form at all."""
    numbers = math.prod(shape[-2:])
    return len(shape) in (2, 3) and numbers > 0 and numbers % GROUP == 0 and numbers < _MOST


@dataclass(frozen=True)
class LosslessStored:
    """A packed store in which some matrices, those whose exponents fit, have the lossless form."""

    where: str
    """For messages."""
    format: Format = LOSSLESS

    @classmethod
    def of_packed(cls, said: Mapping[str, Any], where: str) -> LosslessStored:
        """``quant_method`` lossless."""
        return cls(where)

    def part(self, tensor: str) -> tuple[str, str] | None:
        matrix, _, leaf = tensor.rpartition(f".{_PREFIX}")
        return (matrix, leaf) if matrix and leaf in LEAVES else None

    def matrix(self, name: str, leaves: Mapping[str, Leaf]) -> StoredMatrix | None:
        missing = next((leaf for leaf in LEAVES if leaf not in leaves), None)
        if missing is not None:
            raise UserError(f"{self.where}: tensor {tensor_name(name, missing)} of a matrix in the lossless form is missing; {_ANYTHING}")
        shape, escapes = leaves["low"].shape, leaves["at"].shape[-1:]
        needed = leaf_shapes(shape, escapes[0]) if can_be_coded(shape) and escapes and escapes[0] else {}
        for leaf in LEAVES:
            found = (leaves[leaf].dtype, leaves[leaf].shape)
            if needed.get(leaf) != found:
                raise UserError(
                    f"{self.where}: tensor {leaves[leaf].tensor} is {found[0]} of shape {list(found[1])}, which does not fit a matrix of "
                    f"{list(shape)} in the lossless form; {_ANYTHING}"
                )
        return StoredMatrix(name, shape, self.format, {leaf: leaves[leaf] for leaf in LEAVES})

    def planned(self, name: str, shape: tuple[int, ...]) -> Format | None:
        return self.format if Converted().holds(name, shape) and can_be_coded(shape) else None

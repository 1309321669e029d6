"""Weights in the blocks of a GGUF file, each matrix in a type of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.contract.gguf.gguf_types import block_type
from penstock.planner.contract.given.formats import FORMATS, QUANTISED, Format
from penstock.planner.contract.stored.stored_matrix import Leaf, StoredMatrix

_INTERLEAVED = re.compile(r".*\.self_attn\.(\w+)\.weight")


@dataclass(frozen=True)
class GgufStored:
    """A checkpoint whose tensors' dtypes are the types of their blocks: one leaf, ``weight`` [rows, bytes of a row]."""

    heads: Mapping[str, int]
    """Projection -> its heads, where the file holds the two halves of each head's rows in turn."""
    where: str

    @classmethod
    def of_gguf(cls, said: Mapping[str, Any], where: str) -> GgufStored | None:
        """``quant_method`` gguf, as the reading of such files writes it."""
        heads = said.get("interleaved", {})
        if not isinstance(heads, Mapping) or not all(type(count) is int and count > 0 for count in heads.values()):
            return None
        return cls(MappingProxyType({str(name): count for name, count in heads.items()}), where)

    def part(self, tensor: str) -> tuple[str, str] | None:
        return (tensor, "weight") if tensor.endswith(".weight") else None

    def matrix(self, name: str, leaves: Mapping[str, Leaf]) -> StoredMatrix | None:
        leaf, block = leaves["weight"], block_type(leaves["weight"].dtype)
        projection = _INTERLEAVED.fullmatch(name)
        heads = self.heads.get(projection[1], 0) if projection is not None else 0
        if block is None and not heads:
            return None
        *rows, width = leaf.shape
        if heads and (not rows or rows[-1] % (2 * heads)):
            raise UserError(
                f"{self.where}: tensor {leaf.tensor} has {rows[-1:]} rows, no multiple of twice its {heads} heads; download it again"
            )
        shape = leaf.shape if block is None else (*rows, width // block.nbytes * block.columns)
        known = FORMATS if block is None else QUANTISED
        return StoredMatrix(name, shape, known[leaf.dtype], {"weight": leaf}, heads)

    def planned(self, name: str, shape: tuple[int, ...]) -> Format | None:
        return None

"""Weights in MXFP4: routed experts as gpt-oss stores them, and matrices as compressed-tensors does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.contract.given.formats import QUANTISED, Format
from penstock.planner.contract.stored.scheme import Converted, dotted
from penstock.planner.contract.stored.stored_matrix import Leaf, StoredMatrix

LEAVES: Mapping[str, str] = MappingProxyType({"weight_packed": "blocks", "weight_scale": "scales", "input_global_scale": ""})
"""What compressed-tensors calls a leaf -> what the decoder does; empty where decoding does not need it."""
_FUSED = re.compile(r"(.+\.experts\.\w+)_(blocks|scales)")
_GROUP = 32
"""Columns that share a scale."""


@dataclass(frozen=True)
class Mxfp4Stored:
    """Numbers of 4 bits, two a byte, and a power of two for 32 of them: ``blocks`` and ``scales``, both U8."""

    converted: Converted
    where: str
    """For messages."""

    @classmethod
    def of_mxfp4(cls, said: Mapping[str, Any], where: str) -> Mxfp4Stored | None:
        """``quant_method`` mxfp4, which converts a layer's routed experts alone."""
        return cls(Converted.of(said, experts_only=True), where)

    @classmethod
    def of_compressed(cls, weights: Mapping[str, Any], said: Mapping[str, Any], where: str) -> Mxfp4Stored | None:
        """compressed-tensors' mxfp4-pack-quantized; None for other groups than of 32, and for zero points."""
        known = (weights.get("num_bits"), weights.get("group_size")) == (4, _GROUP) and weights.get("symmetric", True)
        return cls(Converted.of(said), where) if known else None

    def part(self, tensor: str) -> tuple[str, str] | None:
        fused = _FUSED.fullmatch(tensor)
        if fused is not None:
            return fused[1], fused[2]
        found = dotted(tensor, LEAVES)
        return None if found is None else (found[0], LEAVES[found[1]] or found[1])

    def matrix(self, name: str, leaves: Mapping[str, Leaf]) -> StoredMatrix | None:
        blocks, scales = leaves.get("blocks"), leaves.get("scales")
        if blocks is None and scales is None:
            return None
        if blocks is None or scales is None:
            (there,) = (leaf for leaf in (blocks, scales) if leaf is not None)
            missing = "scales" if scales is None else "blocks"
            raise UserError(f"{self.where}: tensor {there.tensor} has no {missing} beside it; download the checkpoint again")
        *outer, rows, columns = scales.shape if len(scales.shape) in (2, 3) else (0, 0)
        usual = {(*outer, rows, columns, _GROUP // 2), (*outer, rows, columns * _GROUP // 2)}
        if blocks.dtype != "U8" or scales.dtype != "U8" or not rows * columns or blocks.shape not in usual:
            raise UserError(
                f"{self.where}: tensor {blocks.tensor} is {blocks.dtype} of shape {list(blocks.shape)}, and {scales.tensor} {scales.dtype} "
                f"of shape {list(scales.shape)}; MXFP4 has U8 in both, and 16 bytes a scale: download the checkpoint again"
            )
        return StoredMatrix(name, (*outer, rows, columns * _GROUP), QUANTISED["MXFP4"], {"blocks": blocks, "scales": scales})

    def planned(self, name: str, shape: tuple[int, ...]) -> Format | None:
        return QUANTISED["MXFP4"] if self.converted.holds(name, shape) else None

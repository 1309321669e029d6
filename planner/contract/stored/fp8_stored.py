"""Weights in FP8 E4M3 with scales: for blocks of 128 x 128, for each row, or for all of a matrix."""

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

LEAVES: Mapping[str, str] = MappingProxyType(
    {"weight": "weight", "weight_scale_inv": "weight_scale", "weight_scale": "weight_scale"}
    | dict.fromkeys(("input_scale", "activation_scale", "weight_scale_2"), "")
)
"""What files call a leaf -> what the decoder does; empty where decoding does not need it."""
_FUSED = re.compile(r"(.+\.experts\.\w+_proj)(?:_(scale_inv|scale))?")
_SCALES = ("F32", "BF16", "F16")


@dataclass(frozen=True)
class Fp8Stored:
    """A checkpoint in FP8: E4M3 bytes, each to be multiplied by a scale, whatever its name (``weight_scale_inv`` of DeepSeek)."""

    format: Format
    converted: Converted
    where: str
    """For messages."""

    @classmethod
    def of_fp8(cls, said: Mapping[str, Any], where: str) -> Fp8Stored | None:
        """``quant_method`` fp8; None for a size of blocks that is not known."""
        known = {"[128, 128]": "FP8", "None": "FP8-tensor"}.get(str(said.get("weight_block_size")))
        return None if known is None else cls(QUANTISED[known], Converted.of(said), where)

    @classmethod
    def of_fbgemm(cls, said: Mapping[str, Any], where: str) -> Fp8Stored | None:
        """``quant_method`` fbgemm_fp8."""
        return cls(QUANTISED["FP8-row"], Converted.of(said), where)

    @classmethod
    def of_compressed(cls, weights: Mapping[str, Any], said: Mapping[str, Any], where: str) -> Fp8Stored | None:
        """compressed-tensors, whose one group says ``weights``; None for a strategy that is not known."""
        known = {"block": "FP8", "channel": "FP8-row", "tensor": "FP8-tensor"}.get(str(weights.get("strategy")))
        if known == "FP8" and weights.get("block_structure") not in ([128, 128], "128x128"):
            return None
        return None if known is None else cls(QUANTISED[known], Converted.of(said), where)

    def part(self, tensor: str) -> tuple[str, str] | None:
        fused = _FUSED.fullmatch(tensor)
        if fused is not None:
            return fused[1], "weight_scale" if fused[2] else "weight"
        found = dotted(tensor, LEAVES)
        return None if found is None else (found[0], LEAVES[found[1]] or found[1])

    def matrix(self, name: str, leaves: Mapping[str, Leaf]) -> StoredMatrix | None:
        weight, scale = leaves.get("weight"), leaves.get("weight_scale")
        if weight is None:
            if scale is None:
                return None
            raise UserError(f"{self.where}: {scale.tensor} has no weight beside it; download the checkpoint again")
        if weight.dtype != "F8_E4M3":
            return None
        if len(weight.shape) not in (2, 3) or 0 in weight.shape:
            raise UserError(f"{self.where}: tensor {weight.tensor} has shape {list(weight.shape)}, allowed is a matrix; download it again")
        if scale is None:
            raise UserError(f"{self.where}: tensor {weight.tensor} in {self.format.name} has no scale beside it; download it again")
        allowed = self._scales(weight.shape)
        if scale.shape not in allowed or scale.dtype not in _SCALES:
            raise UserError(
                f"{self.where}: tensor {scale.tensor} is {scale.dtype} of shape {list(scale.shape)}; a matrix of {list(weight.shape)} "
                f"in {self.format.name} needs {list(allowed[0])} in {', '.join(_SCALES)}: download the checkpoint again"
            )
        return StoredMatrix(name, weight.shape, self.format, {"weight": weight, "weight_scale": scale})

    def planned(self, name: str, shape: tuple[int, ...]) -> Format | None:
        return self.format if self.converted.holds(name, shape) else None

    def _scales(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Shapes that the scales of a matrix may have, the usual one first."""
        *outer, rows, columns = shape
        tall, wide = self.format.block
        if tall > 1:
            return ((*outer, -(-rows // tall), -(-columns // wide)),)
        if tall == 1:
            return (*outer, rows, 1), (*outer, rows)
        return (tuple(outer), (1,), (1, 1)) if not outer else ((*outer, 1, 1), (*outer, 1), tuple(outer))

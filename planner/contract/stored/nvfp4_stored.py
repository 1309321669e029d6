"""Weights in NVFP4, as ModelOpt and compressed-tensors store them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.contract.given.formats import QUANTISED, Format
from penstock.planner.contract.stored.scheme import Converted, dotted
from penstock.planner.contract.stored.stored_matrix import Leaf, StoredMatrix

MODELOPT: Mapping[str, str] = MappingProxyType({"weight": "weight", "weight_scale": "weight_scale", "weight_scale_2": "factor"})
COMPRESSED: Mapping[str, str] = MappingProxyType(
    {"weight_packed": "weight", "weight_scale": "weight_scale", "weight_global_scale": "divisor"}
)
"""What files call a leaf -> what the decoder does."""
_UNUSED = frozenset({"input_scale", "input_global_scale", "k_scale", "v_scale", "pre_quant_scale"})
_GROUP = 16
"""Columns that share a scale."""


@dataclass(frozen=True)
class Nvfp4Stored:
    """Numbers of 4 bits, two a byte, E4M3 scales of 16 of them, and one F32 for the matrix."""

    leaves: Mapping[str, str]
    converted: Converted
    where: str
    """For messages."""

    @classmethod
    def of_modelopt(cls, said: Mapping[str, Any], where: str) -> Nvfp4Stored | None:
        """``quant_method`` modelopt; None for other algorithms than NVFP4."""
        return cls(MODELOPT, Converted.of(said), where) if said.get("quant_algo") == "NVFP4" else None

    @classmethod
    def of_compressed(cls, weights: Mapping[str, Any], said: Mapping[str, Any], where: str) -> Nvfp4Stored | None:
        """compressed-tensors' nvfp4-pack-quantized; None for other groups than of 16, and for zero points."""
        known = (weights.get("num_bits"), weights.get("group_size")) == (4, _GROUP) and weights.get("symmetric", True)
        return cls(COMPRESSED, Converted.of(said), where) if known else None

    def part(self, tensor: str) -> tuple[str, str] | None:
        found = dotted(tensor, _UNUSED | self.leaves.keys())
        return None if found is None else (found[0], self.leaves.get(found[1], found[1]))

    def matrix(self, name: str, leaves: Mapping[str, Leaf]) -> StoredMatrix | None:
        weight, known = leaves.get("weight"), {leaf: leaves[leaf] for leaf in self.leaves.values() if leaf in leaves}
        if not known or (weight is not None and weight.dtype != "U8"):
            return None
        missing = next((stored for stored, leaf in self.leaves.items() if leaf not in known), None)
        if weight is None or missing is not None:
            there = next(iter(known.values())).tensor
            raise UserError(f"{self.where}: tensor {there} in NVFP4 has no {missing} beside it; download the checkpoint again")
        scale, factor = known["weight_scale"], known[[*self.leaves.values()][-1]]
        *outer, rows, half = weight.shape if len(weight.shape) in (2, 3) else (0, 0)
        if not rows * half or 2 * half % _GROUP:
            raise UserError(
                f"{self.where}: tensor {weight.tensor} has shape {list(weight.shape)}, allowed is a matrix of groups of 16 columns"
            )
        one = math.prod(factor.shape) == math.prod(outer)
        if scale.shape != (*outer, rows, 2 * half // _GROUP) or scale.dtype != "F8_E4M3" or factor.dtype != "F32" or not one:
            raise UserError(
                f"{self.where}: {scale.tensor} is {scale.dtype} of shape {list(scale.shape)}, {factor.tensor} {factor.dtype} of shape "
                f"{list(factor.shape)}; beside {weight.tensor} of shape {list(weight.shape)} NVFP4 needs F8_E4M3 of shape "
                f"{[*outer, rows, 2 * half // _GROUP]} and one F32: download the checkpoint again"
            )
        return StoredMatrix(name, (*outer, rows, 2 * half), QUANTISED["NVFP4"], known)

    def planned(self, name: str, shape: tuple[int, ...]) -> Format | None:
        return QUANTISED["NVFP4"] if self.converted.holds(name, shape) else None

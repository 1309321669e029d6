"""Whole numbers of 4 bits as AutoAWQ stores them for its GEMM kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.planner.contract.given.formats import QUANTISED, Format
from penstock.planner.contract.stored.gptq_stored import GptqStored
from penstock.planner.contract.stored.scheme import Converted, Scheme, dotted
from penstock.planner.contract.stored.stored_matrix import Leaf, StoredMatrix
from penstock.planner.contract.stored.whole_stored import SCALES, fits, group_of, known, need

LEAVES = ("qweight", "qzeros", "scales")
IN_WORD = 8
"""Rows that a word holds."""


@dataclass(frozen=True)
class AwqStored:
    """A checkpoint whose linears are numbers packed along their rows."""

    format: Format
    converted: Converted
    where: str
    """For messages."""

    @classmethod
    def of(cls, said: Mapping[str, Any], where: str) -> Scheme:
        """``quant_method`` awq."""
        bits, group = said.get("bits", said.get("w_bit")), said.get("group_size", said.get("q_group_size"))
        size, version, zero = group_of(group), said.get("version", "gemm"), said.get("zero_point", True)
        right = bits == 4 and size is not None and str(version).lower() == "gemm" and zero is True
        known(
            where,
            "awq",
            right,
            "4 bits in the order of gemm with zero points",
            bits=bits,
            group_size=group,
            version=version,
            zero_point=zero,
        )
        return cls(QUANTISED[f"AWQ-{size or 'row'}"], Converted.of(said), where)

    @classmethod
    def of_auto_round(cls, said: Mapping[str, Any], where: str) -> Scheme:
        """``quant_method`` auto-round: in AWQ's packing, or in GPTQ's."""
        return cls.of(said, where) if said.get("packing_format") == "auto_round:auto_awq" else GptqStored.of_auto_round(said, where)

    def part(self, tensor: str) -> tuple[str, str] | None:
        return dotted(tensor, LEAVES)

    def matrix(self, name: str, leaves: Mapping[str, Leaf]) -> StoredMatrix | None:
        need(self.where, name, leaves, *LEAVES)
        packed, zeros, scales = (leaves[leaf] for leaf in LEAVES)
        columns, across = packed.shape if len(packed.shape) == 2 else (0, 0)
        group = self.format.block[1] or columns
        groups = max(1, columns // max(group, 1))
        fits(self.where, packed, ((groups * max(group, 1), max(across, 1)),), ("I32",))
        fits(self.where, zeros, ((groups, across),), ("I32",))
        fits(self.where, scales, ((groups, across * IN_WORD),), SCALES)
        return StoredMatrix(name, (across * IN_WORD, columns), self.format, {"qweight": packed, "qzeros": zeros, "scales": scales})

    def planned(self, name: str, shape: tuple[int, ...]) -> Format | None:
        return self.format if self.converted.holds(name, shape) else None

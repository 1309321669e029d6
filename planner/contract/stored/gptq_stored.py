"""Whole numbers as GPTQ's tools store them, AutoRound's files in the same packing too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.planner.contract.given.formats import BITS, QUANTISED, Format
from penstock.planner.contract.stored.scheme import Converted, Scheme, dotted
from penstock.planner.contract.stored.stored_matrix import Leaf, StoredMatrix
from penstock.planner.contract.stored.whole_stored import SCALES, WORD, fits, group_of, known, need, words

LEAVES = ("qweight", "qzeros", "scales", "g_idx")
_OFFSET = {"gptq": True, "gptq_v2": False}
"""checkpoint_format -> whether zero points are stored less one."""
_AUTO_ROUND = {"auto_round:auto_gptq": True, "auto_round:gptqmodel": False, "auto_round": False}
"""The same of auto-round's packing_format."""


@dataclass(frozen=True)
class GptqStored:
    """A checkpoint whose linears are numbers packed along their columns."""

    format: Format
    less_one: bool
    """Whether zero points are stored less one."""
    converted: Converted
    where: str
    """For messages."""

    @classmethod
    def of(cls, said: Mapping[str, Any], where: str) -> Scheme:
        """``quant_method`` gptq."""
        packing = said.get("checkpoint_format", "gptq")
        return cls._read(said, where, packing, None if said.get("is_marlin_format") else _OFFSET.get(str(packing)))

    @classmethod
    def of_auto_round(cls, said: Mapping[str, Any], where: str) -> Scheme:
        """``quant_method`` auto-round, in any packing but AWQ's."""
        packing = said.get("packing_format", "auto_round:auto_gptq")
        offset = _AUTO_ROUND.get(str(packing)) if said.get("data_type", "int") == "int" else None
        return cls._read(said, where, packing, offset)

    @classmethod
    def _read(cls, said: Mapping[str, Any], where: str, packing: Any, less_one: bool | None) -> GptqStored:
        bits, group, order = said.get("bits"), group_of(said.get("group_size")), said.get("desc_act", False)
        asked = {"bits": bits, "group_size": said.get("group_size"), "format": packing}
        others = f"4 and 8 bits, {', '.join([*_OFFSET, *_AUTO_ROUND])}"
        known(where, str(said.get("quant_method")), bits in BITS and group is not None and less_one is not None, others, **asked)
        name = f"GPTQ{bits}-{group or 'row'}{'-order' if order and group else ''}"
        return cls(QUANTISED[name], bool(less_one), Converted.of(said), where)

    def part(self, tensor: str) -> tuple[str, str] | None:
        return dotted(tensor, LEAVES)

    def matrix(self, name: str, leaves: Mapping[str, Leaf]) -> StoredMatrix | None:
        ordered, bits, group = bool(self.format.column_bits), self.format.element_bits, self.format.block[1]
        need(self.where, name, leaves, "qweight", "qzeros", "scales", *(("g_idx",) if ordered else ()))
        packed, zeros, scales = (leaves[leaf] for leaf in LEAVES[:3])
        down, rows = packed.shape if len(packed.shape) == 2 else (0, 0)
        columns = down * (WORD // bits)
        groups = -(-columns // group) if group else 1
        fits(self.where, packed, ((max(down, 1), max(words(rows, bits), 1) * WORD // bits),), ("I32",))
        fits(self.where, zeros, ((groups, words(rows, bits)),), ("I32",))
        fits(self.where, scales, ((groups, rows),), SCALES)
        kept = {"qweight": packed, "qzeros_less_one" if self.less_one else "qzeros": zeros, "scales": scales}
        if ordered:
            kept["g_idx"] = leaves["g_idx"]
            fits(self.where, kept["g_idx"], ((columns,),), ("I32",))
        return StoredMatrix(name, (rows, columns), self.format, kept)

    def planned(self, name: str, shape: tuple[int, ...]) -> Format | None:
        return self.format if self.converted.holds(name, shape) else None

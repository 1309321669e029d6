"""Whole numbers as compressed-tensors stores them: pack-quantized in 4 or 8 bits, int-quantized in 8."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.planner.contract.given.formats import BITS, QUANTISED, Format
from penstock.planner.contract.stored.scheme import Converted, dotted
from penstock.planner.contract.stored.stored_matrix import Leaf, StoredMatrix
from penstock.planner.contract.stored.whole_stored import SCALES, fits, group_of, known, need, words

LEAVES = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape", "input_scale", "input_zero_point")
"""Of these decoding needs neither the shape, which the others give, nor what is said of activations."""


@dataclass(frozen=True)
class CompressedStored:
    """A checkpoint whose linears are numbers of ``format.element_bits`` with a scale a group, or a row."""

    format: Format
    symmetric: bool
    converted: Converted
    where: str
    """For messages."""

    @classmethod
    def of(cls, weights: Mapping[str, Any], said: Mapping[str, Any], where: str) -> CompressedStored:
        """What the one group says of its ``weights``; ``said`` is the whole quantization_config."""
        bits, strategy, symmetric = weights.get("num_bits"), weights.get("strategy"), weights.get("symmetric", True)
        group = group_of(weights.get("group_size") if strategy == "group" else -1)
        wanted = ("group", "channel", "tensor") if said.get("format") == "int-quantized" else ("group", "channel")
        known(
            where,
            f"compressed-tensors ({said.get('format')})",
            weights.get("type") == "int" and bits in BITS and strategy in wanted and group is not None and type(symmetric) is bool,
            f"int of 4 and 8 bits, by {', '.join(wanted)}",
            num_bits=bits,
            type=weights.get("type"),
            strategy=strategy,
            group_size=weights.get("group_size"),
            symmetric=symmetric,
        )
        return cls(QUANTISED[f"INT{bits}-{group or 'row'}{'' if symmetric else '-asym'}"], symmetric, Converted.of(said), where)

    def part(self, tensor: str) -> tuple[str, str] | None:
        return dotted(tensor, LEAVES)

    def matrix(self, name: str, leaves: Mapping[str, Leaf]) -> StoredMatrix | None:
        plain, packed, bits = leaves.get("weight"), leaves.get("weight_packed"), self.format.element_bits
        if packed is None and (plain is None or plain.dtype != "I8"):
            return None
        need(self.where, name, leaves, "weight_scale", *(() if self.symmetric else ("weight_zero_point",)))
        scale, group = leaves["weight_scale"], self.format.block[1]
        if packed is None:
            assert plain is not None
            stored, columns = plain, (*plain.shape, 0, 0)[1]
            fits(self.where, stored, ((*plain.shape[:1], columns),), ("I8",))
        else:
            stored, columns = packed, scale.shape[-1] * group if group and scale.shape else (*packed.shape, 0, 0)[1] * (32 // bits)
            fits(self.where, stored, ((*packed.shape[:1], words(columns, bits)),), ("I32",))
        rows = stored.shape[0]
        groups = columns // group if group else 1
        shapes: tuple[tuple[int, ...], ...] = ((rows, groups),)
        if not group:
            shapes = (*shapes, (rows,)) if packed is not None else (*shapes, (rows,), (1,), (), (1, 1))
        fits(self.where, scale, shapes if not group or columns % group == 0 else ((rows, -(-columns // group)),), SCALES)
        kept = {stored.tensor.rpartition(".")[2]: stored, "weight_scale": scale}
        if not self.symmetric:
            zero = kept["weight_zero_point"] = leaves["weight_zero_point"]
            if packed is not None:
                fits(self.where, zero, ((words(rows, bits), groups),), ("I32",))
            else:
                fits(self.where, zero, shapes, ("I8",))
        order = leaves.get("weight_g_idx")
        if order is not None and group:
            fits(self.where, order, ((columns,),), ("I32",))
            kept["weight_g_idx"] = order
        return StoredMatrix(name, (rows, columns), self.format, kept)

    def planned(self, name: str, shape: tuple[int, ...]) -> Format | None:
        return self.format if self.converted.holds(name, shape) else None

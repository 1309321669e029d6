"""Routed experts whose matrices are stored coded: what their module holds beside its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.runtime.formats.coding import Coding, Parts

JOINT = "__"
"""Between the name of a matrix and that of its leaf, in the name of a parameter [experts, ...]."""


@dataclass(frozen=True)
class ExpertMatrix:
    """One coded matrix of each expert of a module: ``gate_proj``, ``up_proj`` and ``down_proj`` where a checkpoint stores each expert by
    itself; the module's own parameters, as ``gate_up_proj``, where it stores them together."""

    name: str
    rows: int
    columns: int
    coding: Coding
    leaves: tuple[str, ...]
    product_rows: int
    """The most rows that a card multiplies by the matrix as it is stored."""

    def parts(self, parameters: Parts) -> Parts:
        """The leaves among an expert's ``parameters``."""
        return {leaf: parameters[f"{self.name}{JOINT}{leaf}"] for leaf in self.leaves}


StoredExperts = Mapping[str, tuple[ExpertMatrix, ...]]
"""The module's own parameter, as ``gate_up_proj`` -> the coded matrices that follow each other along its output dimension."""

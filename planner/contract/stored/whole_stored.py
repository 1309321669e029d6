"""Matrices of whole numbers: what their three methods ask of a config, and of the shapes of their tensors, alike."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.planner.common.errors import UserError
from penstock.planner.contract.given.formats import GROUPS
from penstock.planner.contract.stored.stored_matrix import Leaf

WORD = 32
"""Bits that numbers are packed into."""
SCALES = ("F16", "BF16", "F32")
_GROUPS = f"groups of {', '.join(map(str, GROUPS))} columns or -1 for a row"


def known(where: str, method: str, fits: bool, others: str, **said: Any) -> None:
    """Raise UserError in one line, with what was ``said`` and what ``others`` are known beside groups, unless it ``fits``."""
    if not fits:
        variant = ", ".join(f"{key} {str(value)[:40]}" for key, value in said.items())
        raise UserError(f"{where}: {method} with {variant} is not known; known are {others}, {_GROUPS}; use one of these, or BF16")


def group_of(size: Any) -> int | None:
    """Columns of a group, 0 for a whole row; None for a size that is not known."""
    return 0 if size in (-1, None) else size if type(size) is int and size in GROUPS else None


def need(where: str, name: str, leaves: Mapping[str, Leaf], *needed: str) -> None:
    """Raise UserError unless all ``needed`` leaves of the matrix ``name`` are there."""
    missing = [leaf for leaf in needed if leaf not in leaves]
    if missing:
        there = next(iter(leaves.values())).tensor
        raise UserError(f"{where}: {there} has no {missing[0]} beside it; download the checkpoint again")


def fits(where: str, leaf: Leaf, shapes: tuple[tuple[int, ...], ...], dtypes: tuple[str, ...]) -> None:
    """Raise UserError unless ``leaf`` has one of ``shapes`` and one of ``dtypes``."""
    if leaf.shape not in shapes or leaf.dtype not in dtypes:
        raise UserError(
            f"{where}: tensor {leaf.tensor} is {leaf.dtype} of shape {list(leaf.shape)}, and its matrix needs {list(shapes[0])} in "
            f"{' or '.join(dtypes)}; the config is of another model, or the file is damaged: download the checkpoint again"
        )


def words(count: int, bits: int) -> int:
    """How many words hold ``count`` numbers."""
    return -(-count * bits // WORD)

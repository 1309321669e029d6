"""Numbers of GPTQ and AWQ as they are, in the order of rows: compressed-tensors' pack-quantized.

AWQ packs along the output's dimension and GPTQ along columns that lie apart. A CPU without AVX512 turns them before it multiplies, one with
it reads neighbouring rows from places that lie apart, and a card decodes AWQ's. In this order a product reads one row after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.planner.common.errors import UserError
from penstock.planner.contract.checkpoint.checkpoint_files import Checkpoint, stored_matrices
from penstock.planner.contract.stored.stored_matrix import StoredMatrix
from penstock.planner.contract.stored.whole_stored import WORD, words
from penstock.runtime.formats.awq import rows_of
from penstock.runtime.formats.whole_numbers import codes
from penstock.runtime.tools.recoding.sources import Sources

FAMILIES = ("AWQ", "GPTQ")
NUMBERS, ZEROS, LESS_ONE, SCALES, ORDER = "qweight", "qzeros", "qzeros_less_one", "scales", "g_idx"


@dataclass(frozen=True)
class ToRows:
    """A :class:`Recoder` of single tensors: each leaf of a matrix becomes one, or none."""

    matrices: Mapping[str, StoredMatrix]
    leaf_of: Mapping[str, tuple[str, str]]
    """A tensor of the checkpoint -> its matrix, and which leaf of it."""
    symmetric: bool
    """Whether all zero points are the middle: then none is written."""
    plain: tuple[str, ...]
    """Modules with a matrix that is not coded."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, progress: Callable[[int, int], None]) -> tuple[Sources, ToRows]:
        """Reads all zero points, a hundredth of the weights; ``progress(done, total)`` counts their bytes. UserError where matrices are of
        other formats, or in named groups."""
        directory = checkpoint.directory
        matrices = stored_matrices(directory)
        names = {matrix.format.name for matrix in matrices.values()}
        if not names or not all(name.startswith(FAMILIES) for name in names):
            found = f"{directory} has {', '.join(sorted(names)) or 'no coded matrices'}"
            raise UserError(f"format=rows: {found}, allowed are GPTQ and AWQ; pack it without format=")
        for matrix in matrices.values():
            group = matrix.format.block[1]
            if ORDER in matrix.leaves or (group and matrix.shape[1] % group):
                raise UserError(f"format=rows: {matrix.name} has named groups (desc_act) or a part of one; pack it without format=")
        leaf_of = {leaf.tensor: (name, what) for name, matrix in matrices.items() for what, leaf in matrix.leaves.items()}
        unread = {f"{name.removesuffix('weight')}{ORDER}": (name, ORDER) for name in matrices}
        leaf_of |= {tensor: place for tensor, place in unread.items() if tensor in checkpoint.tensors}
        sources = Sources(checkpoint, {tensor: name for tensor, (name, _) in leaf_of.items()})
        bases = (
            name.removesuffix(".weight") for name, entry in checkpoint.tensors.items() if name.endswith(".weight") and len(entry.shape) == 2
        )
        return sources, cls(matrices, leaf_of, _symmetric(sources, matrices, leaf_of, progress), tuple(bases))

    @property
    def said(self) -> Mapping[str, Any]:
        form = next(iter(self.matrices.values())).format
        group = form.block[1]
        weights = {"num_bits": form.element_bits, "type": "int", "symmetric": self.symmetric, "dynamic": False}
        weights |= {"strategy": "group" if group else "channel", "group_size": group or None}
        one = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": list(self.plain),
            "config_groups": {"group_0": one},
        }

    @property
    def leaves(self) -> Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]]:
        return {tensor: self._described(*place) for tensor, place in self.leaf_of.items()}

    def encode(self, name: str, matrix: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The leaf in place of the tensor ``name``, which is given. Takes 12 bytes a number. UserError for a scale that is not finite."""
        owner, leaf = self.leaf_of[name]
        (made,) = self._described(owner, leaf)
        if leaf == SCALES:
            if not matrix.isfinite().all():
                raise UserError(f"format=rows: {name} has numbers that are not finite; download the checkpoint again")
            return {made: matrix.t().contiguous()}
        form = self.matrices[owner].format
        numbers = _by_rows(form.name, form.element_bits, leaf, matrix)
        if leaf == NUMBERS:
            return {made: _in_words(numbers, form.element_bits)}
        return {made: _in_words(numbers.t().contiguous(), form.element_bits).t().contiguous()}

    def _described(self, owner: str, leaf: str) -> dict[str, tuple[str, tuple[int, ...]]]:
        matrix = self.matrices[owner]
        (rows, columns), bits, group = matrix.shape, matrix.format.element_bits, matrix.format.block[1]
        base, groups = owner.removesuffix("weight"), columns // group if group else 1
        if leaf == NUMBERS:
            return {f"{base}weight_packed": ("I32", (rows, words(columns, bits)))}
        if leaf == SCALES:
            return {f"{base}weight_scale": (matrix.leaves[SCALES].dtype, (rows, groups))}
        absent = leaf == ORDER or self.symmetric
        return {} if absent else {f"{base}weight_zero_point": ("I32", (words(rows, bits), groups))}


def _by_rows(form: str, bits: int, leaf: str, stored: torch.Tensor) -> torch.Tensor:
    """Numbers or zero points in bytes, [rows, columns] or [rows, groups]."""
    if form.startswith("AWQ"):
        return rows_of(stored)
    if leaf == NUMBERS:
        return codes(stored.t().contiguous(), bits)
    numbers = codes(stored.contiguous(), bits).t()
    return numbers if leaf == ZEROS else ((numbers.to(torch.int16) + 1) & (1 << bits) - 1).to(torch.uint8)


def _in_words(numbers: torch.Tensor, bits: int) -> torch.Tensor:
    """Bytes [n, m] -> I32 [n, m * bits / 32, rounded up], the first in the lowest bits."""
    each = WORD // bits
    lanes = torch.arange(each, dtype=torch.int32) * bits
    whole = torch.nn.functional.pad(numbers, (0, -numbers.shape[1] % each)).to(torch.int32)
    return (whole.view(len(numbers), -1, each) << lanes).sum(-1, dtype=torch.int32)


def _symmetric(
    sources: Sources, matrices: Mapping[str, StoredMatrix], leaf_of: Mapping[str, tuple[str, str]], progress: Callable[[int, int], None]
) -> bool:
    zeros = [(tensor, *place) for tensor, place in leaf_of.items() if place[1] in (ZEROS, LESS_ONE)]
    total, done = sum(sources.checkpoint.tensors[tensor].nbytes for tensor, *_ in zeros), 0
    for tensor, owner, leaf in zeros:
        form = matrices[owner].format
        if (_by_rows(form.name, form.element_bits, leaf, sources.read(tensor)) != 1 << form.element_bits - 1).any():
            return False
        done += sources.checkpoint.tensors[tensor].nbytes
        progress(done, total)
    return True

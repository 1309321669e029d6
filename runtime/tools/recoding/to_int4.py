"""BF16 matrices rounded to the nearest of 4 bits, in groups of 128 columns, as compressed-tensors stores them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.planner.common.errors import UserError
from penstock.runtime.tools.recoding.sources import Sources

GROUP = 128
"""Columns that share a scale."""
BITS = 4
_IN_WORD = 32 // BITS


@dataclass(frozen=True)
class ToInt4:
    """A :class:`Recoder`: pack-quantized, symmetric. Only each group's range is looked at: for quality take a quantiser's file."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of each tensor that gets the form."""
    plain: tuple[str, ...]
    """Those that stay BF16: columns that make no whole groups, all experts in one tensor."""

    @classmethod
    def of(cls, sources: Sources, progress: Callable[[int, int], None]) -> ToInt4:
        """Reads nothing beforehand. UserError where no matrix has whole groups."""
        shapes = {name: shape for name, shape in sources.matrices.items() if len(shape) == 2 and shape[1] % GROUP == 0}
        if not shapes:
            raise UserError(
                f"format=int4: {sources.checkpoint.directory} has no matrix of its own whose columns are a multiple of {GROUP}; "
                "pack it without format="
            )
        return cls(shapes, tuple(sorted(sources.matrices.keys() - shapes.keys())))

    @property
    def said(self) -> Mapping[str, Any]:
        weights = {"num_bits": BITS, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, "dynamic": False}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head", *(name.removesuffix(".weight") for name in self.plain)],
            "config_groups": {"group_0": group},
        }

    @property
    def leaves(self) -> Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]]:
        return {
            name: {
                _leaf(name, "packed"): ("I32", (rows, columns // _IN_WORD)),
                _leaf(name, "scale"): ("BF16", (rows, columns // GROUP)),
            }
            for name, (rows, columns) in self.shapes.items()
        }

    def encode(self, name: str, matrix: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """scale = largest of the group / 7.5 in BF16, number = weight / scale, as compressed-tensors' minmax. Takes 20 bytes an element.
        UserError for a weight that is not finite."""
        grid = matrix.float().view(len(matrix), -1, GROUP)
        largest = grid.abs().amax(-1)
        if not largest.isfinite().all():
            raise UserError(f"format=int4: {name} has numbers that are not finite; pack it without format=")
        scale = (largest / (2 ** (BITS - 1) - 0.5)).to(torch.bfloat16)
        scale[scale == 0] = 1
        most = 2 ** (BITS - 1)
        numbers = (grid / scale.float()[..., None]).round().clamp(-most, most - 1).to(torch.int32) + most
        lanes = torch.arange(_IN_WORD, dtype=torch.int32) * BITS
        words = (numbers.view(len(matrix), -1, _IN_WORD) << lanes).sum(-1, dtype=torch.int32)
        return {_leaf(name, "packed"): words, _leaf(name, "scale"): scale}


def _leaf(name: str, leaf: str) -> str:
    return f"{name.removesuffix('.weight')}.weight_{leaf}"

"""BF16 matrices in the lossless form, but for units whose exponents do not fit."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.planner.common.errors import UserError
from penstock.planner.contract.stored.lossless_stored import METHOD, can_be_coded, leaf_shapes, tensor_name
from penstock.runtime.formats.twelve.lossless_encoding import codebook, count_exponents, encode
from penstock.runtime.tools.recoding.sources import Sources

FITS = 1 / 64
"""A unit stays BF16 if of one of its matrices more numbers are escapes: each takes 6 bytes, and to put it in place takes as long as to
decode some ten others."""
_ROOM = 64
"""Escapes that there is room for are a multiple of it."""


@dataclass(frozen=True)
class ToLossless:
    """A :class:`Recoder`. Layers are alike: of all matrices with one place in their layer each has room for the most escapes of any."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of each tensor that gets the form."""
    room: Mapping[str, int]
    """Escapes of each of its matrices."""
    plain_units: tuple[str, ...] = ()
    """Units that stay BF16."""

    @classmethod
    def of(cls, sources: Sources, progress: Callable[[int, int], None]) -> ToLossless:
        """Reads all matrices once, to count their exponents; ``progress(done, total)`` counts bytes. UserError where none fits."""
        escapes: dict[str, int] = {}
        plain: set[str] = set()
        total = sum(2 * math.prod(shape) for shape in sources.matrices.values())
        done = 0
        for name, shape in sources.matrices.items():
            fits = can_be_coded(shape)
            escapes[name] = max((codebook(count_exponents(matrix))[1] for matrix in sources.each(name)), default=0) if fits else 0
            if not fits or escapes[name] > FITS * math.prod(shape[-2:]):
                plain.add(sources.units[name])
            done += 2 * math.prod(shape)
            progress(done, total)
        shapes = {name: shape for name, shape in sources.matrices.items() if sources.units[name] not in plain}
        if not shapes:
            raise UserError(
                f"format=lossless: in each unit of {sources.checkpoint.directory} exponents take more than 4 bits; pack it without format="
            )
        most: dict[str, int] = defaultdict(int)
        for name in shapes:
            most[_place(name)] = max(most[_place(name)], escapes[name], 1)
        return cls(shapes, {name: -(-most[_place(name)] // _ROOM) * _ROOM for name in shapes}, tuple(sorted(plain)))

    @property
    def said(self) -> Mapping[str, Any]:
        return {"quant_method": METHOD}

    @property
    def leaves(self) -> Mapping[str, Mapping[str, tuple[str, tuple[int, ...]]]]:
        return {
            name: {tensor_name(name, leaf): stored for leaf, stored in leaf_shapes(shape, self.room[name]).items()}
            for name, shape in self.shapes.items()
        }

    def encode(self, name: str, matrix: torch.Tensor) -> Mapping[str, torch.Tensor]:
        exponents, _ = codebook(count_exponents(matrix))
        return {tensor_name(name, leaf): part for leaf, part in encode(matrix, exponents, self.room[name]).items()}


def _place(name: str) -> str:
    """A tensor's name without the numbers of its layer and its expert."""
    return re.sub(r"\.\d+\.", ".N.", re.sub(r"\.\d+\.", ".N.", name))

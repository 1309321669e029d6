"""What the tensors of one unit add up to, while a checkpoint's names are sorted."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.planner.contract.given.formats import FORMATS, Format
from penstock.planner.contract.given.unit_spec import UnitKind, UnitSpec


class TensorInfo(NamedTuple):
    """What a spec needs to know of one stored tensor."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it: ``BF16``, ``F32``, ..."""


@dataclass
class Tally:
    """Bytes and elements so far; false while there are none."""

    nbytes: int = 0
    elements: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)
    """Name -> bytes."""

    def __bool__(self) -> bool:
        return self.nbytes > 0

    def add(self, info: TensorInfo) -> None:
        self.nbytes += info.nbytes
        self.elements += math.prod(info.shape)
        self.dtypes[info.dtype] += info.nbytes

    def format(self, other: Format) -> Format:
        """The format of most bytes; ``other`` where no tensor has one, as among norms of any dtype."""
        return next((FORMATS[name] for name, _ in self.dtypes.most_common() if name in FORMATS), other)

    def unit(self, kind: UnitKind, layer: int | None, other: Format, count: int = 1) -> UnitSpec:
        """``count`` equal units that hold all of it."""
        return UnitSpec(kind, layer, self.nbytes // count, self.elements // count, self.format(other), count)

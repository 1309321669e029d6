"""What the tensors of one unit add up to, while a checkpoint's names are sorted."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.planner.contract.given.formats import KNOWN_FORMATS, QUANTISED, Format
from penstock.planner.contract.given.unit_spec import UnitKind, UnitSpec


class TensorInfo(NamedTuple):
    """What a spec needs to know of one stored tensor."""

    nbytes: int
    shape: tuple[int, ...]
    dtype: str
    """As safetensors names it: ``BF16``, ``F32``, ... Of a quantised matrix, counted with its scales, the name of its format."""

    @property
    def scratch_bytes(self) -> int:
        """Of one of its matrices, decoded; 0 where it is not coded."""
        form = KNOWN_FORMATS.get(self.dtype)
        return math.prod(self.shape[-2:]) * form.plain.nbytes if form and form.needs_scratch else 0

    @classmethod
    def of(cls, shape: tuple[int, ...], stored: Format) -> TensorInfo:
        """A matrix, or as many as ``shape`` counts before its last two numbers, in the format ``stored``."""
        columns, rows, count = (*reversed(shape), 1, 1)[0], (*reversed(shape), 1, 1)[1], math.prod(shape[:-2])
        return cls(count * stored.stored_bytes(rows, columns), shape, stored.name)


@dataclass
class Tally:
    """Bytes and elements so far; false while there are none."""

    dtypes: Counter[str] = field(default_factory=Counter)
    """Name -> bytes."""
    counts: Counter[str] = field(default_factory=Counter)
    """Name -> elements."""

    def __bool__(self) -> bool:
        return self.nbytes > 0

    @property
    def nbytes(self) -> int:
        return self.dtypes.total()

    @property
    def elements(self) -> int:
        return self.counts.total()

    def add(self, info: TensorInfo) -> None:
        self.dtypes[info.dtype] += info.nbytes
        self.counts[info.dtype] += math.prod(info.shape)

    def take(self, other: Tally) -> None:
        """Add all of ``other``."""
        self.dtypes += other.dtypes
        self.counts += other.counts

    def loose(self, computed: str) -> Tally:
        """Cut off what does not move with the unit: whatever has another dtype than most bytes; beside coded matrices, what is neither
        coded nor stored in ``computed``."""
        cut, names = Tally(), [name for name, _ in self.dtypes.most_common()]
        coded = not QUANTISED.keys().isdisjoint(names)
        for name in [name for name in names if name not in QUANTISED and name != computed] if coded else names[1:]:
            cut.dtypes[name], cut.counts[name] = self.dtypes.pop(name), self.counts.pop(name)
        return cut

    def format(self, other: Format) -> Format:
        """The format of most bytes; ``other`` where no tensor has one, as among norms of any dtype."""
        return next((KNOWN_FORMATS[name] for name, _ in self.dtypes.most_common() if name in KNOWN_FORMATS), other)

    def unit(self, kind: UnitKind, layer: int | None, other: Format, count: int = 1) -> UnitSpec:
        """``count`` equal units that hold all of it."""
        return UnitSpec(kind, layer, self.nbytes // count, self.elements // count, self.format(other), count)

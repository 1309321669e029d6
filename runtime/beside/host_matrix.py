"""A matrix in DRAM, as it is stored, that the CPU multiplies where it lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from penstock.runtime.beside.coded_parts import MOST_COLUMNS, PARTS_OF
from penstock.runtime.beside.host_library import MOST_PARTS, CMatrix, matrix_kinds


@dataclass(frozen=True)
class HostMatrix:
    """``rows`` outputs of ``columns`` inputs. ``parts`` are addresses; whoever made the matrix keeps their memory, or hands it over in
    ``kept``."""

    kind: str
    """A name of :func:`matrix_kinds`."""
    rows: int
    columns: int
    group: int
    """Elements that share a scale, where the kind has such groups; else 0."""
    parts: tuple[int, ...]
    bytes: int
    """That one product reads."""
    kept: tuple[torch.Tensor, ...] = field(default=(), compare=False, repr=False)

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether inputs of BF16 or F16 may be ``dtype``: the lossless form is one of BF16."""
        return dtype is torch.bfloat16 or self.kind != "lossless"

    def in_c(self) -> CMatrix:
        """As the library takes it. Raises ValueError for a kind that it has not."""
        kinds = matrix_kinds()
        if self.kind not in kinds:
            raise ValueError(f"no product with {self.kind}; there are {', '.join(kinds)}")
        parts = (self.parts + (0,) * MOST_PARTS)[:MOST_PARTS]
        return CMatrix(kinds[self.kind], self.group, self.rows, self.columns, (type(CMatrix().part))(*parts))


Maker = Callable[[str, Mapping[str, torch.Tensor]], HostMatrix]
"""Gets the name of a format and a module's stored tensors by leaf."""


def _plain(format_name: str, tensors: Mapping[str, torch.Tensor]) -> HostMatrix:
    weight = tensors["weight"]
    rows, columns = weight.shape
    return made_matrix(format_name, rows, columns, 0, weight)


def made_matrix(kind: str, rows: int, columns: int, group: int, *parts: torch.Tensor | None, flags: tuple[bool, ...] = ()) -> HostMatrix:
    """Of tensors, which it keeps; None for a part that there is not. ``flags`` follow behind, as parts that are there or not.

    Raises ValueError for a tensor that is not contiguous or not on the CPU.
    """
    given = [part for part in parts if part is not None]
    for part in given:
        if not part.is_contiguous() or part.device.type != "cpu":
            raise ValueError(f"a tensor of strides {part.stride()} on {part.device} is no plain memory")
    addresses = (*(0 if part is None else part.data_ptr() for part in parts), *map(int, flags))
    return HostMatrix(kind, rows, columns, group, addresses, sum(part.nbytes for part in given), tuple(given))


MAKERS: Mapping[str, Maker] = MappingProxyType({"BF16": _plain, "F16": _plain, "F32": _plain})
"""Of matrices as they are computed with, by the name of a format."""


def host_matrix_of(format_name: str, tensors: Mapping[str, torch.Tensor]) -> HostMatrix | None:
    """The matrix of a linear layer's stored tensors; None where the CPU has no product of its own with that format."""
    make, coded = MAKERS.get(format_name), PARTS_OF.get(format_name)
    if make is not None:
        return make(format_name, tensors)
    found = None if coded is None else coded(tensors)
    if found is None or found.columns > MOST_COLUMNS:
        return None
    return made_matrix(found.kind, found.rows, found.columns, found.group, *found.parts, flags=found.flags)

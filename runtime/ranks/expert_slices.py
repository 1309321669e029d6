"""A slice of a routed expert: where its bytes lie in the file of the whole one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

from penstock.planner.common.measures import align_up
from penstock.runtime.reading.layout import PARAMETER_ALIGN, Extent, TensorLayout, UnitLayout

DOWN = "down_proj"
"""The parameter whose columns are an expert's width; of the others these are rows."""
GATE_UP = "gate_up_proj"
"""Has the gate's rows before those of the up."""


@dataclass(frozen=True)
class Runs:
    """``count`` runs of ``nbytes`` each: ``pitch`` apart in the whole expert, from ``first`` on; behind one another in the slice, from
    ``dest`` on."""

    first: int
    nbytes: int
    pitch: int
    count: int
    dest: int


@dataclass(frozen=True)
class CutExtents(Sequence[Extent]):
    """What of ``whole`` fills ``runs``, each one extent: made when it is asked for, since a slice has one for each row of ``down_proj``."""

    whole: Sequence[Extent]
    runs: Sequence[Runs]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[Extent]:
        for run in self.runs:
            for number in range(run.count):
                yield from self._parts(run.first + number * run.pitch, run.nbytes, run.dest + number * run.nbytes)

    @overload
    def __getitem__(self, at: int) -> Extent: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Extent]: ...
    def __getitem__(self, at: int | slice) -> Extent | Sequence[Extent]:
        return list(self)[at]

    def _parts(self, first: int, nbytes: int, dest: int) -> Iterator[Extent]:
        end = first + nbytes
        for extent in self.whole:
            begin, stop = max(first, extent.dest), min(end, extent.dest + extent.nbytes)
            if begin < stop:
                yield Extent(extent.file, extent.offset + begin - extent.dest, stop - begin, dest + begin - first)


def slice_of(layout: UnitLayout, number: int, count: int) -> UnitLayout:
    """Slice ``number`` of ``count`` of the expert that ``layout`` is of: tensors of a ``count``-th of its width, one behind the other.

    Rows of a gate and of an up are runs of the file. Columns of ``down_proj`` are one for each of its rows.
    """
    tensors: list[TensorLayout] = []
    runs: list[Runs] = []
    end = 0
    for tensor in layout.tensors:
        at, (rows, columns), row = align_up(end, PARAMETER_ALIGN), tensor.shape, tensor.nbytes // tensor.shape[0]
        if tensor.name == DOWN:
            shape, run = (rows, columns // count), Runs(tensor.offset + number * (row // count), row // count, row, rows, at)
        else:
            parts = 2 if tensor.name == GATE_UP else 1
            each = rows // parts // count
            shape = (parts * each, columns)
            run = Runs(tensor.offset + number * each * row, each * row, rows // parts * row, parts, at)
        runs.append(run)
        end = at + run.count * run.nbytes
        tensors.append(replace(tensor, shape=shape, offset=at, nbytes=run.count * run.nbytes))
    return UnitLayout(align_up(end), tuple(tensors), CutExtents(layout.extents, runs), sum(tensor.nbytes for tensor in tensors))

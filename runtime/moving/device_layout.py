"""Where a unit's tensors lie in VRAM."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from penstock.planner.common.measures import align_up
from penstock.planner.contract.prices.sizes import OVERHEADS
from penstock.runtime.memory.pieces import Segment
from penstock.runtime.memory.vram import TENSOR_ALIGN
from penstock.runtime.reading.layout import TensorLayout, UnitLayout

_RUN_ALIGN = 16
_BETWEEN = 256
"""Bytes between two tensors are copied along where they are less than one part in so many of a unit."""


@dataclass(frozen=True)
class DeviceLayout:
    """A unit in VRAM: tensors 256-aligned, as few copies as alignment allows."""

    nbytes: int
    tensors: tuple[TensorLayout, ...]
    segments: tuple[Segment, ...]


def device_layout(layout: UnitLayout) -> DeviceLayout:
    """Re-place ``layout``'s tensors for VRAM.

    Tensors that lie behind one another in DRAM are one copy if each of them then starts at a multiple of 16 bytes. Few bytes between them
    are copied, too: between two copies of a launched pass the link waits for the host, some 0.2 ms.
    In a checkpoint in place a tensor starts at any byte. In VRAM it may not.
    """
    spare = min(OVERHEADS.unit_padding_bytes, layout.payload_bytes // _BETWEEN)
    tensors: list[TensorLayout] = []
    segments: list[Segment] = []
    for t in sorted(layout.tensors, key=lambda t: t.offset):
        last = segments[-1] if segments else None
        end = last.dst + last.nbytes if last else 0
        apart, along = align_up(end, TENSOR_ALIGN), last.dst + t.offset - last.src if last else -1
        if last is not None and end <= along <= max(apart, end + spare) and along % _RUN_ALIGN == 0:
            dst = along
            spare -= max(0, along - apart)
            segments[-1] = replace(last, nbytes=dst + t.nbytes - last.dst)
        else:
            dst = apart
            segments.append(Segment(t.offset, dst, t.nbytes))
        tensors.append(replace(t, offset=dst))
    end = segments[-1].dst + segments[-1].nbytes
    return DeviceLayout(align_up(end, TENSOR_ALIGN), tuple(tensors), tuple(segments))


def alike(layouts: Iterable[UnitLayout]) -> Iterator[DeviceLayout]:
    """Each of ``layouts`` re-placed for VRAM, so that all with the same tensors lie alike: kernels that take several at once need it, and
    what is made of a slot's tensors holds for whatever comes there next.

    A tensor is a copy of its own unless it follows the one before it as in VRAM, which a packed store sees to.
    """
    orders: dict[frozenset[tuple[str, int]], list[str]] = {}
    for layout in layouts:
        named = {t.name: t for t in layout.tensors}
        these = frozenset((name, t.nbytes) for name, t in named.items())
        order = orders.setdefault(these, sorted(named, key=lambda name: named[name].offset))
        tensors: list[TensorLayout] = []
        segments: list[Segment] = []
        end = 0
        for t in map(named.__getitem__, order):
            dst, last = align_up(end, TENSOR_ALIGN), segments[-1] if segments else None
            if last is not None and t.offset - last.src == dst - last.dst:
                segments[-1] = replace(last, nbytes=dst + t.nbytes - last.dst)
            else:
                segments.append(Segment(t.offset, dst, t.nbytes))
            tensors.append(replace(t, offset=dst))
            end = dst + t.nbytes
        yield DeviceLayout(align_up(end, TENSOR_ALIGN), tuple(tensors), tuple(segments))

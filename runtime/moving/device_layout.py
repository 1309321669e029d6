"""Where a unit's tensors lie in VRAM."""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.planner.common.measures import align_up
from penstock.runtime.memory.pieces import Segment
from penstock.runtime.memory.vram import TENSOR_ALIGN
from penstock.runtime.reading.layout import TensorLayout, UnitLayout

_RUN_ALIGN = 16


@dataclass(frozen=True)
class DeviceLayout:
    """A unit in VRAM: tensors 256-aligned, as few copies as alignment allows."""

    nbytes: int
    tensors: tuple[TensorLayout, ...]
    segments: tuple[Segment, ...]


def device_layout(layout: UnitLayout) -> DeviceLayout:
    """Re-place ``layout``'s tensors for VRAM.

    Tensors of one run in DRAM stay one copy if each of them then starts at a multiple of 16 bytes. Bytes between them are copied, too, if
    they are no more than the next one's alignment would take. In a checkpoint in place a tensor starts at any byte. In VRAM it may not.
    """
    tensors: list[TensorLayout] = []
    segments: list[Segment] = []
    for t in sorted(layout.tensors, key=lambda t: t.offset):
        last = segments[-1] if segments else None
        end = last.dst + last.nbytes if last else 0
        apart, along = align_up(end, TENSOR_ALIGN), last.dst + t.offset - last.src if last else -1
        if last is not None and end <= along <= max(end, apart) and along % _RUN_ALIGN == 0:
            dst = along
            segments[-1] = replace(last, nbytes=dst + t.nbytes - last.dst)
        else:
            dst = apart
            segments.append(Segment(t.offset, dst, t.nbytes))
        tensors.append(replace(t, offset=dst))
    end = segments[-1].dst + segments[-1].nbytes
    return DeviceLayout(align_up(end, TENSOR_ALIGN), tuple(tensors), tuple(segments))

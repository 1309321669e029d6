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

    Tensors that follow one another in DRAM stay one copy if each of them then starts at a multiple of 16 bytes. In a checkpoint in place a
    tensor starts at any byte; in VRAM it may not.
    """
    tensors: list[TensorLayout] = []
    segments: list[Segment] = []
    src_end = -1
    for t in sorted(layout.tensors, key=lambda t: t.offset):
        last = segments[-1] if segments else None
        if last is not None and t.offset == src_end and (last.dst + last.nbytes) % _RUN_ALIGN == 0:
            dst = last.dst + last.nbytes
            segments[-1] = replace(last, nbytes=last.nbytes + t.nbytes)
        else:
            dst = align_up(last.dst + last.nbytes, TENSOR_ALIGN) if last else 0
            segments.append(Segment(t.offset, dst, t.nbytes))
        tensors.append(replace(t, offset=dst))
        src_end = t.offset + t.nbytes
    end = segments[-1].dst + segments[-1].nbytes
    return DeviceLayout(align_up(end, TENSOR_ALIGN), tuple(tensors), tuple(segments))

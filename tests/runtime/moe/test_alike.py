"""Experts of a checkpoint that is read in place lie alike in VRAM, wherever their tensors lie in the file."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.common.measures import align_up
from penstock.runtime.memory.vram import TENSOR_ALIGN
from penstock.runtime.moving.device_layout import alike
from penstock.runtime.reading.layout import TensorLayout, UnitLayout

SIZES = st.lists(st.integers(1, 700), min_size=1, max_size=5)


def laid(sizes: list[int], gaps: list[int], order: list[int]) -> UnitLayout:
    """Tensors 0, 1, ... one behind the other in ``order``, each behind a gap."""
    at, tensors = 0, []
    for gap, k in zip(gaps, order, strict=True):
        at += gap
        tensors.append(TensorLayout(str(k), (sizes[k],), torch.uint8, at, sizes[k]))
        at += sizes[k]
    return UnitLayout(align_up(at, 4096), tuple(tensors), (), sum(sizes))


@settings(max_examples=60, deadline=None)
@given(st.data(), SIZES)
def test_all_lie_alike_and_every_byte_comes(data: st.DataObject, sizes: list[int]) -> None:
    count = len(sizes)
    gaps = st.lists(st.integers(0, 300), min_size=count, max_size=count)
    units = [laid(sizes, data.draw(gaps), data.draw(st.permutations(range(count)))) for _ in range(3)]
    found = list(alike(units))
    assert len({layout.tensors for layout in found}) == 1 and len({layout.nbytes for layout in found}) == 1
    assert all(t.offset % TENSOR_ALIGN == 0 for t in found[0].tensors)
    for unit, layout in zip(units, found, strict=True):
        source = torch.randint(1, 255, (unit.nbytes,), dtype=torch.uint8)
        slot = torch.zeros(layout.nbytes, dtype=torch.uint8)
        for s in layout.segments:
            slot[s.dst : s.dst + s.nbytes] = source[s.src : s.src + s.nbytes]
        there = {t.name: t for t in layout.tensors}
        for t in unit.tensors:
            at = there[t.name].offset
            assert torch.equal(slot[at : at + t.nbytes], source[t.offset : t.offset + t.nbytes])


def test_what_lies_in_memory_as_in_vram_is_one_copy() -> None:
    unit = laid([256, 512, 40], [0, 0, 0], [1, 0, 2])
    (layout,) = alike([unit])
    assert len(layout.segments) == 1 and layout.nbytes == 1024

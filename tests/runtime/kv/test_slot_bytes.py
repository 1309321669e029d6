"""A record's bytes find their slot in a pool of any arrangement, and come back from there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from penstock.planner.common.errors import UserError
from penstock.runtime.kv.disk.page_record import PageShape
from penstock.runtime.kv.pages.slot_bytes import SlotBytes

LAYERS, SLOTS = 4, 5
SHAPE = PageShape(bytes(16), 16, LAYERS, 4096)


def one_block() -> list[torch.Tensor]:
    return list(torch.zeros(LAYERS, SLOTS * 4096, dtype=torch.uint8))


def apart() -> list[torch.Tensor]:
    return [torch.zeros(SLOTS * 4096, dtype=torch.uint8) for _ in range(LAYERS)]


def backwards() -> list[torch.Tensor]:
    return one_block()[::-1]


def uneven() -> list[torch.Tensor]:
    block = torch.zeros(2 * LAYERS, SLOTS * 4096, dtype=torch.uint8)
    return [block[i] for i in (0, 1, 3, 7)]


ARRANGEMENTS = {one_block: 1, apart: 4, backwards: 4, uneven: 4}
"""And the kernels that a slot takes."""


def record_of(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (SHAPE.payload_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("on_card", [(), (0,), (1, 2), (0, 2, 3), (0, 1, 2, 3)])
@pytest.mark.parametrize("arrange", ARRANGEMENTS)
def test_a_record_comes_back_from_any_slot(arrange: Callable[[], list[torch.Tensor]], on_card: tuple[int, ...]) -> None:
    """Layers need not be numbered without gaps: others may keep no K and V."""
    held = arrange()
    there = {held[i].data_ptr() for i in on_card}
    slots = SlotBytes(SHAPE, {3 * i: buffer for i, buffer in enumerate(held)}, lambda buffer: buffer.data_ptr() in there)
    records = {2: record_of(2), 0: record_of(0), 4: record_of(4)}
    for slot, record in records.items():
        packed = torch.zeros_like(record)
        for at, start, nbytes in slots.card_ranges:
            packed[at : at + nbytes] = record[start : start + nbytes]
        slots.fill(slot, packed)
        slots.fill_host(slot, record)
    for slot, record in records.items():
        want = record.view(LAYERS, -1)
        assert all(torch.equal(held[i][slot * 4096 : (slot + 1) * 4096], want[i]) for i in range(LAYERS))
        packed, back = torch.zeros_like(record), torch.zeros_like(record)
        slots.pack(slot, packed)
        slots.pack_host(slot, back)
        for at, start, nbytes in slots.card_ranges:
            back[start : start + nbytes] = packed[at : at + nbytes]
        assert torch.equal(back, record)
    assert all(not buffer.view(SLOTS, -1)[slot].any() for buffer in held for slot in (1, 3)), "another slot was written to"
    assert slots.any_on_host == (len(on_card) < LAYERS) and slots.card_bytes == 4096 * len(on_card)


@pytest.mark.parametrize("arrange", ARRANGEMENTS)
def test_layers_at_equal_distances_take_one_kernel(arrange: Callable[[], list[torch.Tensor]]) -> None:
    slots = SlotBytes(SHAPE, dict(enumerate(arrange())), lambda buffer: True)
    assert len(slots._on_card) == ARRANGEMENTS[arrange] and slots.card_ranges == [(0, 0, SHAPE.payload_bytes)]


@pytest.mark.parametrize("layers", [3, 5])
def test_a_pool_of_another_shape_is_refused(layers: int) -> None:
    with pytest.raises(UserError, match="the model's KV is not 4 layers of 4096 bytes for 16 tokens"):
        SlotBytes(SHAPE, {i: torch.zeros(SLOTS * 4096, dtype=torch.uint8) for i in range(layers)}, lambda buffer: False)
    with pytest.raises(UserError, match="leave kv.dir out"):
        SlotBytes(SHAPE, {i: torch.zeros(SLOTS * 2048, dtype=torch.uint8) for i in range(LAYERS)}, lambda buffer: False)

"""Headers say what they are, or are no headers."""

from __future__ import annotations

import pytest

from planner.errors import UserError
from planner.units import ALIGN
from runtime.kv.record import MAX_LAYERS, Header, PageShape, checksums, damaged_layer, decode
from runtime.kv.segments import aligned
from tests.runtime.kv.pages import SHAPE, key_of, payload_of

HEADER = Header(SHAPE, segment=7, slot=2, key=key_of(1), parent=key_of(0), sums=checksums(payload_of(key_of(1)), SHAPE.layer_bytes))


@pytest.fixture
def page() -> memoryview:
    view = aligned(ALIGN)
    HEADER.encode(view)
    return view


def test_a_header_comes_back(page: memoryview) -> None:
    assert decode(page, 7) == HEADER


def test_a_header_counts_only_in_its_own_segment(page: memoryview) -> None:
    assert decode(page, 8) is None


def test_every_bit_of_a_header_matters(page: memoryview) -> None:
    for bit in range(ALIGN * 8):
        page[bit // 8] ^= 1 << bit % 8
        assert decode(page, 7) is None, f"bit {bit}"
        page[bit // 8] ^= 1 << bit % 8
    assert decode(page, 7) == HEADER


def test_the_most_layers_fit() -> None:
    shape = PageShape(bytes(16), 16, MAX_LAYERS, ALIGN)
    page = aligned(ALIGN)
    header = Header(shape, 0, 0, bytes(16), bytes(16), bytes(range(8)) * MAX_LAYERS)
    header.encode(page)
    assert decode(page, 0) == header


@pytest.mark.parametrize(("layers", "layer_bytes"), [(MAX_LAYERS + 1, ALIGN), (0, ALIGN), (1, 0), (1, ALIGN + 512)])
def test_shapes_that_cannot_be_stored_are_refused(layers: int, layer_bytes: int) -> None:
    with pytest.raises(UserError):
        PageShape(bytes(16), 16, layers, layer_bytes)


def test_the_damaged_layer_is_named() -> None:
    payload = bytearray(payload_of(key_of(1)))
    layer_bytes = SHAPE.layer_bytes
    payload[layer_bytes + 5] ^= 1
    assert damaged_layer(memoryview(payload), range(3), layer_bytes, HEADER.sums) == 1
    assert damaged_layer(memoryview(payload)[2 * layer_bytes :], range(2, 3), layer_bytes, HEADER.sums) is None
    assert damaged_layer(memoryview(payload)[2 * layer_bytes :], range(1, 2), layer_bytes, HEADER.sums) == 1

"""Headers say what they are, or are no headers."""

from __future__ import annotations

import pytest

from penstock.planner.common.errors import UserError
from penstock.planner.common.measures import ALIGN
from penstock.runtime.kv.disk.page_keys import FORMAT
from penstock.runtime.kv.disk.page_record import Header, PageShape, checksum_of, decode, is_of_other_format
from penstock.runtime.kv.disk.segments import aligned
from tests.runtime.kv.pages import SHAPE, key_of, payload_of

HEADER = Header(SHAPE, segment=7, slot=2, key=key_of(1), parent=key_of(0), checksum=checksum_of(payload_of(key_of(1))))


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


def test_a_header_of_another_format_is_known_as_such(page: memoryview, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_of_other_format(page)
    monkeypatch.setattr("penstock.runtime.kv.disk.page_record.FORMAT", FORMAT + 1)
    assert is_of_other_format(page) and decode(page, 7) is None
    page[5000 % ALIGN] ^= 1
    assert not is_of_other_format(page), "a damaged one may be anything"


@pytest.mark.parametrize(("layers", "layer_bytes"), [(0, ALIGN), (1, 0), (1, ALIGN + 512)])
def test_shapes_that_cannot_be_stored_are_refused(layers: int, layer_bytes: int) -> None:
    with pytest.raises(UserError):
        PageShape(bytes(16), 16, layers, layer_bytes)

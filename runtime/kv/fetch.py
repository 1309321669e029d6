"""One page from its segment into memory, checked."""

from __future__ import annotations

from planner.units import ALIGN
from runtime.kv.index import Place
from runtime.kv.record import damaged_layer, decode
from runtime.kv.segments import SegmentFiles


class Damaged(Exception):
    """Why a page cannot be used, and the name of the counter for that."""

    def __init__(self, counter: str, reason: str):
        super().__init__(reason)
        self.counter = counter


def fetch(files: SegmentFiles, place: Place, key: bytes, target: memoryview, layers: range) -> None:
    """Read ``layers`` of the page ``key`` into ``target``, which they fill, and check them. Damaged, OSError: ``target`` is undefined."""
    segment, shape, sums = place.segment, place.segment.shape, place.sums
    offset = place.slot * shape.record_bytes
    if sums is None and layers.start == 0:  # header and blocks lie side by side
        page = files.header_page()
        got = files.read(segment.number, [page, target], offset) - ALIGN
        sums = _sums(place, key, page, got >= 0)
    else:
        if sums is None:
            page = files.header_page()
            sums = _sums(place, key, page, files.read(segment.number, [page], offset) == ALIGN)
        got = files.read(segment.number, [target], offset + ALIGN + layers.start * shape.layer_bytes)
    if got < len(target):
        raise Damaged("failed_truncated", "its file is too short")
    layer = damaged_layer(target, layers, shape.layer_bytes, sums)
    if layer is not None:
        raise Damaged("failed_checksum", f"the checksum of layer {layer} is wrong")
    place.sums = sums


def _sums(place: Place, key: bytes, page: memoryview, whole: bool) -> bytes:
    if not whole:
        raise Damaged("failed_truncated", "its file is too short")
    header = decode(page, place.segment.number)
    if header is None or (header.key, header.slot, header.shape) != (key, place.slot, place.segment.shape):
        raise Damaged("failed_header", "its header is damaged")
    return header.sums

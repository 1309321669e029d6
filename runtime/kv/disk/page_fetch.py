"""One page from its segment into memory, checked."""

from __future__ import annotations

from penstock.planner.common.measures import ALIGN
from penstock.runtime.kv.disk.page_index import Place
from penstock.runtime.kv.disk.page_record import checksum_of, decode
from penstock.runtime.kv.disk.segments import SegmentFiles


class Damaged(Exception):
    """Why a page cannot be used, and the name of the counter for that."""

    def __init__(self, counter: str, reason: str):
        super().__init__(reason)
        self.counter = counter


def fetch(files: SegmentFiles, place: Place, key: bytes, target: memoryview) -> int:
    """Read the page ``key`` into ``target``, which it fills, and check it -> its checksum. Damaged, OSError: ``target`` is undefined."""
    segment, offset, checksum = place.segment, place.slot * place.segment.shape.record_bytes, place.checksum
    if checksum is None:
        page = files.header_page()
        got = files.read(segment.number, [page, target], offset) - ALIGN
        checksum = _told(place, key, page, got >= 0)
    else:
        got = files.read(segment.number, [target], offset + ALIGN)
    if got < len(target):
        raise Damaged("failed_truncated", "its file is too short")
    if checksum_of(target) != checksum:
        raise Damaged("failed_checksum", "its checksum is wrong")
    place.checksum = checksum
    return checksum


def _told(place: Place, key: bytes, page: memoryview, whole: bool) -> int:
    """The checksum that the header in ``page`` tells."""
    if not whole:
        raise Damaged("failed_truncated", "its file is too short")
    header = decode(page, place.segment.number)
    if header is None or (header.key, header.slot, header.shape) != (key, place.slot, place.segment.shape):
        raise Damaged("failed_header", "its header is damaged")
    return header.checksum

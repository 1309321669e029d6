"""What lies in the page cache is copied from there, everything else is read past it."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.planner.common.measures import ALIGN
from penstock.runtime.reading import cached as cached_module
from penstock.runtime.reading.blocks import pieces_of
from penstock.runtime.reading.cached import CachedReads, PageCache
from penstock.runtime.reading.layout import Extent
from penstock.runtime.reading.reader import ReadPool, Reads
from penstock.runtime.reading.store_errors import StoreError

MIB = 1 << 20


@pytest.fixture
def content(tmp_path: Path) -> tuple[Path, bytes]:
    data = os.urandom(MIB)
    path = tmp_path / "weights"
    path.write_bytes(data)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    return path, data


@pytest.fixture
def warm(content: tuple[Path, bytes]) -> tuple[Path, bytes]:
    """All of it lies in the page cache, where the kernel can say so."""
    path, data = content
    path.read_bytes()
    cache, into = PageCache(), buffer(ALIGN)
    try:
        if not cache.read(path, into, 0):
            pytest.skip("this kernel or file system cannot say what the page cache holds")
    finally:
        cache.close()
    return path, data


def buffer(nbytes: int) -> memoryview:
    return memoryview(mmap.mmap(-1, nbytes))


def read(source: Reads, extents: Sequence[Extent], into: memoryview) -> list[BaseException | None]:
    """What ``done`` was told."""
    told: list[BaseException | None] = []
    arrived = threading.Event()
    source.read(extents, into, lambda error: (told.append(error), arrived.set()))
    assert arrived.wait(10)
    return told


def test_what_the_page_cache_holds_never_asks_the_drive(warm: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = warm
    monkeypatch.setattr(cached_module, "PIECE_BYTES", 16 * ALIGN)
    into = buffer(MIB)
    with ReadPool(2, 1 << 18) as pool:
        cached = CachedReads(pool, 3)
        try:
            assert read(cached, (Extent(path, 100, MIB - 100, 100), Extent(path, 0, 100, 0)), into) == [None]
        finally:
            cached.close()
        assert into == data and pool.meter.reads == 0 and cached.meter.bytes == MIB


def test_what_it_does_not_hold_is_read_past_it_and_lands_in_the_same_place(
    content: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other piece is said to be there."""
    path, data = content
    monkeypatch.setattr(cached_module, "PIECE_BYTES", 16 * ALIGN)

    def every_other(cache: PageCache, path: Path, into: memoryview, offset: int) -> bool:
        if offset // (16 * ALIGN) % 2:
            return False
        into[:] = data[offset : offset + len(into)]
        return True

    monkeypatch.setattr(PageCache, "read", every_other)
    into = buffer(MIB + ALIGN)
    with ReadPool(2, 1 << 18) as pool:
        cached = CachedReads(pool, 3)
        try:
            assert read(cached, (Extent(path, 0, MIB, 0, owns_pages=True),), into) == [None]
        finally:
            cached.close()
        assert into[:MIB] == data
        assert cached.meter.bytes == pool.meter.bytes == MIB // 2


def test_a_file_that_is_not_there_is_the_pools_to_report_once(tmp_path: Path) -> None:
    with ReadPool(2, 1 << 18) as pool:
        cached = CachedReads(pool, 2)
        try:
            (error,) = read(cached, [Extent(tmp_path / "nowhere", k * ALIGN, ALIGN, k * ALIGN) for k in range(5)], buffer(MIB))
        finally:
            cached.close()
    assert isinstance(error, StoreError) and "nowhere" in str(error)


def test_closing_ends_every_read_that_was_asked_for(content: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = content
    go, begun, told = threading.Event(), threading.Event(), []

    def slow(*_: object) -> bool:
        begun.set()
        return go.wait(10)

    monkeypatch.setattr(PageCache, "read", slow)
    before = set(threading.enumerate())
    with ReadPool(1, 1 << 18) as pool:
        cached = CachedReads(pool, 1)
        for k in range(4):
            cached.read((Extent(path, k * ALIGN, ALIGN, 0),), buffer(ALIGN), told.append)
        assert begun.wait(10)
        threading.Timer(0.05, go.set).start()
        cached.close()
        with pytest.raises(StoreError, match="closed"):
            cached.read((Extent(path, 0, ALIGN, 0),), buffer(ALIGN), told.append)
        assert len(told) == 4 and told[0] is None and all("cancelled" in str(error) for error in told[1:])
    assert {t for t in threading.enumerate() if not isinstance(t, threading.Timer)} <= before


def test_a_pool_that_is_closed_first_fails_the_read(content: tuple[Path, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PageCache, "read", lambda *_: False)
    pool = ReadPool(1, 1 << 18)
    cached = CachedReads(pool, 1)
    pool.close()
    try:
        (error,) = read(cached, (Extent(content[0], 0, ALIGN, 0),), buffer(ALIGN))
    finally:
        cached.close()
    assert isinstance(error, StoreError)


@given(offset=st.integers(0, 5 * ALIGN), nbytes=st.integers(1, 9 * ALIGN), most=st.integers(1, 4).map(lambda k: k * ALIGN))
def test_pieces_cover_an_extent_and_keep_its_pages_apart(offset: int, nbytes: int, most: int) -> None:
    whole = Extent(Path("w"), offset, nbytes, offset % ALIGN + 7 * ALIGN, owns_pages=True)
    pieces = list(pieces_of(whole, most))
    assert [p.offset for p in pieces] == [offset, *(p.offset + p.nbytes for p in pieces[:-1])]
    assert sum(p.nbytes for p in pieces) == nbytes and all(0 < p.nbytes <= most for p in pieces)
    assert all(p.offset % ALIGN == 0 for p in pieces[1:]), "two pieces never share a page"
    assert {p.dest - p.offset for p in pieces} == {whole.dest - whole.offset} and all(p.owns_pages for p in pieces)

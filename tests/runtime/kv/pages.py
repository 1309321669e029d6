"""Pages whose bytes follow from their key, so that every byte that is served can be judged."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

from penstock.runtime.kv.disk.disk_pages import DiskPages
from penstock.runtime.kv.disk.page_keys import ROOT
from penstock.runtime.kv.disk.page_record import PageShape, checksum_of
from penstock.runtime.kv.disk.page_writer import DiskWriter
from penstock.runtime.kv.disk.segments import aligned

SHAPE = PageShape(bytes(range(16)), page_tokens=16, layers=3, layer_bytes=8192)
OTHER = PageShape(bytes(range(16, 32)), page_tokens=16, layers=2, layer_bytes=4096)


def key_of(i: int) -> bytes:
    return hashlib.blake2b(i.to_bytes(8, "little"), digest_size=16).digest()


def payload_of(key: bytes, shape: PageShape = SHAPE) -> bytes:
    return hashlib.shake_128(key + shape.namespace).digest(shape.payload_bytes)


def buffer_of(key: bytes, shape: PageShape = SHAPE) -> memoryview:
    view = aligned(shape.payload_bytes)
    view[:] = payload_of(key, shape)
    return view


def open_writer(directory: Path, shape: PageShape = SHAPE, pages: int = 64, segment_pages: int = 4, **options: object) -> DiskWriter:
    """A writer whose limit is ``pages`` pages in segments of ``segment_pages``."""
    sizes = {"limit_bytes": pages * shape.record_bytes, "segment_bytes": segment_pages * shape.record_bytes}
    return DiskWriter(directory, shape, **sizes, **options)


def offer(writer: DiskWriter, number: int, done: Callable[[bool], None]) -> bool:
    """Queue a page; whether it was taken."""
    payload = buffer_of(key_of(number), writer.shape)
    return writer.put(key_of(number), ROOT, payload, checksum_of(payload), done)


def put(writer: DiskWriter, *numbers: int) -> list[bool]:
    """Write pages one after the other; whether each was stored."""
    results = []
    for i in numbers:
        done = threading.Event()

        def note(stored: bool, done: threading.Event = done) -> None:
            results.append(stored)
            done.set()

        assert offer(writer, i, note)
        assert done.wait(30)
    return results


def served(pages: DiskPages, *numbers: int) -> list[int]:
    """Those of ``numbers`` that are read; every byte of them is checked."""
    into = aligned(pages.shape.payload_bytes)
    found = []
    for i in numbers:
        key = key_of(i)
        if pages.read(key, into) is not None:
            assert into == payload_of(key, pages.shape), f"page {i}: wrong bytes"
            found.append(i)
    return found


def failures(pages: DiskPages) -> dict[str, int]:
    """What went wrong while reading, by kind."""
    return {name: count for name, count in pages.counters().items() if name.startswith("failed") and count}


def flip(path: Path, offset: int) -> None:
    """Change one bit."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 4]))

"""What the disk tier of the KV cache did, for the report."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass


@dataclass
class Counters:
    """Pages unless the name says otherwise."""

    written: int = 0
    written_bytes: int = 0
    already_there: int = 0
    skipped_queue_full: int = 0
    skipped_late: int = 0
    """Still queued when `kv.flush_s` was over."""
    skipped_disk_full: int = 0
    skipped_write_error: int = 0
    read_hits: int = 0
    read_bytes: int = 0
    read_absent: int = 0
    failed_checksum: int = 0
    """Reads of a page whose payload is damaged; the page is then dropped, as in all kinds below."""
    failed_header: int = 0
    failed_truncated: int = 0
    failed_error: int = 0
    """Reads that the operating system failed."""
    failed_missing: int = 0
    """Reads of a page whose segment is gone: evicted by another process, or removed by hand."""
    evicted_segments: int = 0
    evicted: int = 0
    index_rebuilt: int = 0
    """Openings that found the index missing or damaged and read all headers."""
    index_unwritten: int = 0
    """Times that the index could not be written."""
    broken_callbacks: int = 0
    """Callbacks of ``put`` that raised."""


class Tally:
    """Counters that several threads add to, and one line to the user for the first of each trouble."""

    def __init__(self, warn: Callable[[str], None]):
        self.counters = Counters()
        self._warn = warn
        self._warned: set[str] = set()
        self._lock = threading.Lock()

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self.counters, name, getattr(self.counters, name) + count)

    def trouble(self, name: str, line: str) -> None:
        """Count one; the first of its name is also printed."""
        self.add(**{name: 1})
        with self._lock:
            first = name not in self._warned
            self._warned.add(name)
        if first:
            self._warn(f"{line} (reported once, counted in the report)")

    def facts(self) -> dict[str, int]:
        with self._lock:
            return asdict(self.counters)

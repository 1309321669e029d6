"""Extents cut into the reads that the SSD sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from penstock.planner.common.measures import ALIGN, align_down, align_up
from penstock.runtime.reading.layout import Extent


class Landing(IntEnum):
    """How a block's bytes get to their place when they are read with O_DIRECT; the numbers are those of block.h."""

    whole = 0
    """The aligned superset lands in the buffer."""
    edges = 1
    """Whole pages land in the buffer; the pages at the edges, shared with others, are copied."""
    staged = 2
    """Everything is copied."""


class Block(NamedTuple):
    """One read: ``nbytes`` wanted at ``offset``, into ``dest`` of the buffer."""

    file: Path
    offset: int
    nbytes: int
    dest: int
    landing: Landing

    @property
    def start(self) -> int:
        """Where the aligned superset begins in the file."""
        return align_down(self.offset)

    @property
    def stop(self) -> int:
        """Where the aligned superset ends in the file."""
        return align_up(self.offset + self.nbytes)


def check_fits(extents: Iterable[Extent], buffer_bytes: int) -> None:
    """ValueError names the first of ``extents`` that lies outside a buffer."""
    for extent in extents:
        if extent.dest < 0 or extent.dest + extent.nbytes > buffer_bytes:
            raise ValueError(f"{extent} does not fit a buffer of {buffer_bytes} bytes")


class Run(NamedTuple):
    """An extent that is read in blocks of ``step`` bytes, aligned superset included."""

    file: Path
    offset: int
    nbytes: int
    dest: int
    landing: Landing
    step: int


def runs(extents: Iterable[Extent], block_bytes: int, staged_bytes: int, buffer_bytes: int, buffer_aligned: bool) -> Iterator[Run]:
    """``extents`` in blocks of at most ``block_bytes``, or ``staged_bytes`` where all is copied.

    Both limits are multiples of 4096. Nothing of an extent is copied if it keeps its alignment, owns its 4096-byte pages and lies in an
    aligned buffer. If it shares its pages, only those at its edges are copied.
    """
    for extent in extents:
        lead = extent.offset % ALIGN
        base = extent.dest - lead
        landing = Landing.staged
        if buffer_aligned and base % ALIGN == 0:
            if extent.owns_pages and base >= 0 and base + align_up(lead + extent.nbytes) <= buffer_bytes:
                landing = Landing.whole
            elif extent.nbytes >= 2 * ALIGN and staged_bytes >= 2 * ALIGN:
                landing = Landing.edges
        step = staged_bytes if landing is Landing.staged else block_bytes
        yield Run(extent.file, extent.offset, extent.nbytes, extent.dest, landing, step)


def cut(runs: Iterable[Run]) -> Iterator[Block]:
    """The blocks of ``runs``, in order; request.c says the same."""
    for run in runs:
        end = run.offset + run.nbytes
        for start in range(align_down(run.offset), end, run.step):
            offset = max(start, run.offset)
            yield Block(run.file, offset, min(start + run.step, end) - offset, run.dest + offset - run.offset, run.landing)


def pieces_of(extent: Extent, most_bytes: int) -> Iterator[Extent]:
    """``extent`` cut at 4096-byte boundaries of the file into pieces of at most ``most_bytes``."""
    start, end = extent.offset, extent.offset + extent.nbytes
    if start < end <= align_down(start + most_bytes):
        yield extent
        return
    while start < end:
        stop = min(align_down(start + most_bytes), end)
        yield replace(extent, offset=start, nbytes=stop - start, dest=extent.dest + start - extent.offset)
        start = stop

"""Where the bytes of a block land when its pages are read as a whole."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

from penstock.planner.common.measures import ALIGN, align_down, align_up
from penstock.runtime.reading.blocks import Block, Landing


class Range(NamedTuple):
    """``nbytes`` bytes from ``at`` on, of the buffer or of staging."""

    staged: bool
    at: int
    nbytes: int


class Copied(NamedTuple):
    """``nbytes`` bytes that are copied from ``source`` of staging to ``dest`` of the buffer."""

    source: int
    dest: int
    nbytes: int


def lands(block: Block) -> tuple[list[Range], list[Copied]]:
    """Where the aligned superset of ``block`` lands, in order, and what is copied after: three ranges and two copies at most."""
    start, stop, end = block.start, block.stop, block.offset + block.nbytes
    lead = block.offset - start
    all_staged = [Range(True, 0, stop - start)], [Copied(lead, block.dest, block.nbytes)]
    if block.landing is Landing.staged:
        return all_staged
    base = block.dest - lead
    if block.landing is Landing.whole:
        return [Range(False, base, stop - start)], []
    first, last = align_up(block.offset), align_down(end)
    if first > last:  # all within one 4096-byte page
        return all_staged
    ranges, copies = [], []
    if lead:
        ranges.append(Range(True, 0, ALIGN))
        copies.append(Copied(lead, block.dest, ALIGN - lead))
    if last > first:
        ranges.append(Range(False, base + first - start, last - first))
    if end > last:
        ranges.append(Range(True, ALIGN, ALIGN))
        copies.append(Copied(ALIGN, base + last - start, end - last))
    return ranges, copies


def targets(block: Block, into: memoryview, staging: memoryview) -> tuple[list[memoryview], list[Copied]]:
    """The same, the ranges as memory."""
    ranges, copies = lands(block)
    return [(staging if r.staged else into)[r.at : r.at + r.nbytes] for r in ranges], copies


def after(views: list[memoryview], nbytes: int) -> list[memoryview]:
    """``views`` without their first ``nbytes`` bytes."""
    rest = []
    for view in views:
        if nbytes < len(view):
            rest.append(view[nbytes:] if nbytes else view)
        nbytes = max(0, nbytes - len(view))
    return rest


def address_of(view: memoryview) -> int:
    """Where a writable buffer lies in memory. Keeps no reference to it."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))

"""Where the bytes of a block land when its pages are read as a whole."""

from __future__ import annotations

import ctypes

from penstock.planner.common.measures import ALIGN, align_down, align_up
from penstock.runtime.reading.blocks import Block, Landing


def targets(block: Block, into: memoryview, staging: memoryview) -> tuple[list[memoryview], list[tuple[int, int, int]]]:
    """Where the aligned superset of ``block`` lands, in order, and what is copied after: (from staging, to buffer, bytes).
    block.c says the same."""
    start, stop, end = block.start, block.stop, block.offset + block.nbytes
    lead = block.offset - start
    if block.landing is Landing.staged:
        return [staging[: stop - start]], [(lead, block.dest, block.nbytes)]
    base = block.dest - lead
    if block.landing is Landing.whole:
        return [into[base : base + stop - start]], []
    views, copies = [], []
    first, last = align_up(block.offset), align_down(end)
    if first > last:  # all within one 4096-byte page
        return [staging[: stop - start]], [(lead, block.dest, block.nbytes)]
    if lead:
        views.append(staging[:ALIGN])
        copies.append((lead, block.dest, ALIGN - lead))
    if last > first:
        views.append(into[base + first - start : base + last - start])
    if end > last:
        views.append(staging[ALIGN : 2 * ALIGN])
        copies.append((ALIGN, base + last - start, end - last))
    return views, copies


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

"""Where the matrices of several experts begin, as a Triton kernel that multiplies by all of them finds it."""

from __future__ import annotations

import triton
import triton.language as tl

MOST_EXPERTS = 8
"""Matrices of one launch."""
PLACES = [f"at{number}" for number in range(MOST_EXPERTS)]
"""The arguments that say where these begin."""
PLACE = 256
"""Bytes that experts' places are multiples of."""


@triton.jit
def begin_of(memory, table, expert, at0, at1, at2, at3, at4, at5, at6, at7, TABLED: tl.constexpr):
    """Where ``expert`` begins behind ``memory``, whose numbers are bytes. Places are arguments, or are read from ``table``, where a
    recorded launch finds others each time."""
    if TABLED:
        begin = memory + tl.load(table + expert) * 256
    else:
        at = tl.where(expert == 0, at0, tl.where(expert == 1, at1, tl.where(expert == 2, at2, at3)))
        more = tl.where(expert == 4, at4, tl.where(expert == 5, at5, tl.where(expert == 6, at6, at7)))
        begin = memory + tl.where(expert < 4, at, more).to(tl.int64) * 256
    return begin

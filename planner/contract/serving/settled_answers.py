"""Between which answers a load is measured: what a server does all day, without rows that fill and empty."""

from __future__ import annotations

SETTLED = 0.25
"""Share of the answers at either end that is left out."""
WAVES = 8
"""Requests for each row, so that all rows are taken until the last quarter of the answers."""


def settled_answers(count: int, together: int = 1) -> tuple[int, int]:
    """Places of the first and the last one in the order in which ``count`` ended; the same place twice where there are too few.
    ``together``: requests that clients of a closed loop have under way.

    Requests of one length end in waves of ``together``. So a wave's begin to another's end would be too short a time: of 256 requests in 32
    rows it gave a rate 24 % too high. Whole waves lie between the two.
    """
    first, last = int(SETTLED * count), count - 1 - int(SETTLED * count)
    if last <= first:
        return first, first
    return first, max(last - (last - first) % together, min(last, first + together))

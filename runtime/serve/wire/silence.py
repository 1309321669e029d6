"""Whether a motor gets on: it says something at least once a pass, and every second or two where it has nothing to do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TIMES, LEAST_S = 20, 60.0
"""Silence that is taken for a hang: so many times the longest pass that the plan predicts, at least so many seconds."""
LOOKS = 20
"""In that time. A front that stood still itself looks once when it goes on, so that it takes no motor for hung."""


def patience_s(longest_pass_s: float, hang_s: float | None) -> float:
    """Seconds of silence after which a motor is taken for hung; ``hang_s`` where a user said so."""
    return max(LEAST_S, TIMES * longest_pass_s) if hang_s is None else hang_s


async def silent(words: Callable[[], int], seconds: float) -> None:
    """Return once ``words``, which counts what was heard, has been the same for so many seconds."""
    looks, last = 0, words()
    while looks < LOOKS:
        await asyncio.sleep(seconds / LOOKS)
        now = words()
        looks, last = (looks + 1, last) if now == last else (0, now)

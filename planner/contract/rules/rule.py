"""A rule that a plan breaks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BrokenRule:
    """``message`` is one line: the value, what is allowed, the remedy."""

    name: str
    message: str


def out_of_range(key: str, value: int, low: int, high: int | None = None, why: str = "") -> BrokenRule:
    """``key`` must lie between ``low`` and ``high``; ``why`` goes behind what is allowed."""
    allowed = f"{low} or more" if high is None else f"{low} to {high}" if high > low else str(low)
    return BrokenRule(f"{key} range", f"{key}={value}; allowed: {allowed}{why}; set it so")

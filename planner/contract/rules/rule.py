"""A rule that a plan breaks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BrokenRule:
    """``message`` is one line: the value, what is allowed, the remedy."""

    name: str
    message: str

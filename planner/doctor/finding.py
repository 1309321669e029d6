"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """What a finding means for a run."""

    good = "good"
    fair = "fair"
    """A run works, and could be faster or larger."""
    stops = "stops"
    """A run cannot work."""
    unknown = "unknown"
    """The machine does not say."""


@dataclass(frozen=True)
class Finding:
    """What is, whether it is good, and what to change and why; ``change`` is empty where nothing is to be changed."""

    name: str
    found: str
    verdict: Verdict
    change: str = ""

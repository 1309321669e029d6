"""The numbers in the rules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The numbers in the rules."""

    headroom_min: int = 3
    """Layers of DRAM cache above ``cap``: one that computes or is copied, one that is ready, one that is being read."""
    headroom_spare: int = 2
    """Slots beyond ``headroom_min`` that are taken where they cost no time, to ride out late reads and copies."""
    headroom_max: int = 10
    """More headroom than this holds layers that residents would hold better."""
    chunk_min_tokens: int = 256
    """Prompt tokens of a pass, where a prompt has as many: smaller passes read all weights again for too few."""
    ring_margin: int = 2
    """Ring slots beyond the prefetch distance: the unit that computes and the one that just did."""
    page_tokens: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    ssd_page_tokens_min: int = 64
    """Smaller pages make SSD reads too small."""
    layer_read_bytes: int = 500_000
    """A layer of a kept page can be read alone, in reads of this size at least, where any page size gives that."""


LIMITS = Limits()

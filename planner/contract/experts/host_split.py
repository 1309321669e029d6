"""Which missed experts the CPU computes where they lie, while the link brings the others: by figures alone, for simulator and runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

NOBODY: tuple[int, ...] = ()


@dataclass(frozen=True)
class HostSplit:
    """Seconds of one expert on either way.

    With k of n missed experts on the CPU, q seconds of copies on the link before them, b the share of a rate that is left while both are
    at work, the visit waits for

        max(asked_s + hop + sum of host_s, max(q, k * asked_s) + (n - k) * copy_s), each at its b until the shorter one ends

    and the least k is taken for which that is least. The CPU takes those with the fewest rows, whose products are shortest; a copy takes
    as long for any. The link keeps what it brings, so it gets those that the caller names first.
    """

    copy_s: float
    """Over the link, while the CPU rests."""
    host_s: tuple[float, ...]
    """The CPU's product by rows, from one row on, while the link rests. An expert with more rows is copied."""
    hop_s: float
    """To hand rows over and results back."""
    host_beside: float = 1.0
    """The share of the CPU's rate that is left while the link copies."""
    link_beside: float = 1.0
    """The share of the link's rate that is left while the CPU computes."""
    asked_s: float = 0.0
    """The host's to ask the CPU for one. It asks for all of them before it queues the first copy."""

    def ends(self, rows: Sequence[int], copied: int, queue_s: float = 0.0, queued: bool = False) -> tuple[float, float]:
        """Seconds until the CPU's results of experts of ``rows`` are there, and until ``copied`` others are where they are computed; 0 for
        none. ``queued``: some of what the link had begun with is waited for, too."""
        return self.ends_of(sum(self.host_s[n - 1] for n in rows), len(rows), copied, queue_s, queued)

    def ends_of(self, host_s: float, asked: int, copied: int, queue_s: float, queued: bool = False) -> tuple[float, float]:
        """The same where the CPU's products with as many as are ``asked`` for take ``host_s`` while the link rests."""
        link_s = queue_s + copied * self.copy_s
        both_s = min(host_s / self.host_beside, link_s / self.link_beside)
        host_s, link_s = host_s + both_s * (1 - self.host_beside), link_s + both_s * (1 - self.link_beside)
        idle_s = max(0.0, asked * self.asked_s - queue_s) if copied else 0.0
        return self.asked_s + self.hop_s + host_s if asked else 0.0, idle_s + link_s if copied or queued else 0.0

    def lasts(self, rows: Sequence[int], copied: int, queue_s: float = 0.0) -> float:
        """Seconds until all of these are there."""
        return max(self.ends(rows, copied, queue_s))

    def on_host(self, rows: Sequence[int], queue_s: float = 0.0) -> tuple[int, ...]:
        """Positions in ``rows``, one entry a missed expert that lies in DRAM, of those that the CPU computes, in the order given.
        ``queue_s``: seconds of copies that the link has queued already. O(n log n) for n experts; kept for the next time, since a step's
        visits ask the same again and the card waits for the answer."""
        return _on_host(self, tuple(rows), queue_s)


@lru_cache(maxsize=1024)
def _on_host(split: HostSplit, rows: tuple[int, ...], queue_s: float) -> tuple[int, ...]:
    fits = [at for at, n in enumerate(rows) if 1 <= n <= len(split.host_s)]
    order = sorted(fits, key=lambda at: (rows[at], -at))
    seconds = accumulate((split.host_s[rows[at] - 1] for at in order), initial=0.0)
    waits = [max(split.ends_of(host_s, k, len(rows) - k, queue_s)) for k, host_s in enumerate(seconds)]
    return tuple(sorted(order[: waits.index(min(waits))]))

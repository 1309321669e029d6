"""Which missed experts the CPU computes where they lie, while the link brings the others: by figures alone, for simulator and runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

NOBODY: tuple[int, ...] = ()


@dataclass(frozen=True)
class HostSplit:
    """Seconds of one expert on either way.

    With k of n missed experts on the CPU, q seconds of copies on the link before them, b the share of a rate that is left while both are
    at work, the visit waits for

        max(hop + sum of host_s / b_host, q + (n - k) * copy_s / b_link)

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

    def lasts(self, rows: Sequence[int], copied: int, queue_s: float = 0.0) -> float:
        """Seconds until experts of ``rows`` on the CPU and ``copied`` others are where they are computed, the CPU's results too."""
        both = bool(rows) and copied > 0
        host = self.hop_s + sum(self.host_s[n - 1] for n in rows) / (self.host_beside if both else 1.0) if rows else 0.0
        link = queue_s + copied * self.copy_s / (self.link_beside if both else 1.0) if copied else 0.0
        return max(host, link)

    def on_host(self, rows: Sequence[int], queue_s: float = 0.0) -> tuple[int, ...]:
        """Positions in ``rows``, one entry a missed expert that lies in DRAM, of those that the CPU computes, in the order given.
        ``queue_s``: seconds of copies that the link has queued already. O(n log n) for n experts; kept for the next time, since a step's
        visits ask the same again and the card waits for the answer."""
        return _on_host(self, tuple(rows), queue_s)

    def each_s(self, experts: int) -> float:
        """Seconds that each of ``experts`` missed ones of one row adds to a visit, on average."""
        taken = len(self.on_host([1] * experts))
        return self.lasts([1] * taken, experts - taken) / experts


@lru_cache(maxsize=1024)
def _on_host(split: HostSplit, rows: tuple[int, ...], queue_s: float) -> tuple[int, ...]:
    fits = [at for at, n in enumerate(rows) if 1 <= n <= len(split.host_s)]
    order = sorted(fits, key=lambda at: (rows[at], -at))
    waits = [split.lasts([rows[at] for at in order[:k]], len(rows) - k, queue_s) for k in range(len(order) + 1)]
    return tuple(sorted(order[: waits.index(min(waits))]))

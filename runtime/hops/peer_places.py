"""Which bytes of whose memory a channel between two ranks has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, permutations
from typing import NamedTuple

LINE = 64
"""Bytes from one word to the next: each has a line of the CPU's cache for itself."""


class Kind(NamedTuple):
    """Channels of one use."""

    slots: int
    slot_bytes: int


ROUND_TRIP = Kind(3, 8 << 20)
"""By which a pass goes round: one piece is written and one read while one waits."""
ONCE = Kind(2, 2 << 20)
"""For what comes once a pass: logits, and the hidden states that they are made of."""
Key = tuple[int, int, Kind]
"""Sender, receiver and kind."""


@dataclass(frozen=True)
class PeerPlaces:
    """Of ``count`` ranks, whose passes go by ``ways`` (from, to)."""

    count: int
    ways: Sequence[tuple[int, int]]

    @cached_property
    def channels(self) -> Sequence[Key]:
        """In the order of their words."""
        return [(*way, ROUND_TRIP) for way in self.ways] + [(*pair, ONCE) for pair in permutations(range(self.count), 2)]

    @property
    def word_bytes(self) -> int:
        """Of all channels' words."""
        return 2 * LINE * len(self.channels)

    def words(self, channel: Key) -> tuple[int, int]:
        """Where those of what was sent and of what was taken begin."""
        begin = 2 * LINE * self.channels.index(channel)
        return begin, begin + LINE

    def vram_bytes(self, rank: int) -> int:
        """That ``rank`` takes for what comes to it."""
        return sum(kind.slots * kind.slot_bytes for _, _, kind in self._to(rank))

    def slots(self, channel: Key) -> list[int]:
        """Where each begins, in what the receiver took."""
        to = self._to(channel[1])
        begins = [0, *accumulate(kind.slots * kind.slot_bytes for _, _, kind in to)]
        return [begins[to.index(channel)] + number * channel[2].slot_bytes for number in range(channel[2].slots)]

    def _to(self, rank: int) -> list[Key]:
        return [channel for channel in self.channels if channel[1] == rank]

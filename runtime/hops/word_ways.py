"""Hops inside a recorded step: hidden states through page-locked memory that the cards of a host share, in an order that words keep.

Nothing but kernels, writes of words and waits for words is recorded, as for units that the CPU computes. A hop from one rank to another has
one place and one word for each direction:

    sender    waits until the word is 0; writes the place; word = 1
    receiver  waits until the word is 1; reads the place; word = 0

So nobody overtakes anybody, whatever lies between two steps. A wait is never for what is recorded behind it on the same card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Protocol

import torch

LINE = 64
"""Bytes from one word to the next: each has a line of the CPU's cache for itself."""
EMPTY, FULL = 0, 1


class Flags(Protocol):
    """A recorded stream's words, by their address: ``recorded.host_steps.Flags``."""

    def write_word(self, address: int, value: int) -> None: ...
    def wait_word(self, address: int, value: int) -> None: ...


@dataclass(frozen=True)
class HopPlaces:
    """Which bytes of a memory that ``count`` ranks share are whose. A hop takes at most ``nbytes``."""

    count: int
    nbytes: int

    @property
    def pairs(self) -> Sequence[tuple[int, int]]:
        """Who sends to whom, in the order of their words."""
        return list(permutations(range(self.count), 2))

    @property
    def all_bytes(self) -> int:
        """Of words and places together: ranks * (ranks - 1) of each."""
        return len(self.pairs) * (LINE + self._each)

    def word(self, sender: int, receiver: int) -> int:
        """Where the word of that way begins."""
        return self.pairs.index((sender, receiver)) * LINE

    def place(self, sender: int, receiver: int) -> int:
        """Where its hidden states begin."""
        return len(self.pairs) * LINE + self.pairs.index((sender, receiver)) * self._each

    @property
    def _each(self) -> int:
        return -(-self.nbytes // LINE) * LINE


class WordHop:
    """``hops.hop.Hop`` to and from one peer, while a step is recorded."""

    def __init__(self, ways: WordWays, peer: int):
        self._ways, self._peer = ways, peer

    def receive(self, into: torch.Tensor) -> None:
        ways, sender = self._ways, (self._peer, self._ways.rank)
        word = ways.word(*sender)
        ways.flags.wait_word(word, FULL)
        torch.mul(ways.place(*sender, like=into), 1, out=into)  # a kernel: a copy would wait for the link
        ways.flags.write_word(word, EMPTY)
        ways.received += 1
        ways.received_bytes += into.nbytes

    def coming(self, into: torch.Tensor) -> Callable[[], None]:
        return lambda: self.receive(into)

    def send(self, hidden: torch.Tensor) -> None:
        ways, receiver = self._ways, (self._ways.rank, self._peer)
        word = ways.word(*receiver)
        ways.flags.wait_word(word, EMPTY)
        torch.mul(hidden, 1, out=ways.place(*receiver, like=hidden))
        ways.flags.write_word(word, FULL)
        ways.sent_bytes += hidden.nbytes


class WordWays:
    """``dealt_layer.Ways`` of ``rank``, whose kernels and words go to ``flags``. Attributes count what a step receives and sends.

    ``words`` are the addresses of the shared memory's bytes as the driver knows them, ``memory`` the same bytes as kernels do.
    """

    def __init__(self, rank: int, places: HopPlaces, words: int, memory: torch.Tensor, flags: Flags):
        self.rank, self._places, self._words, self._memory, self.flags = rank, places, words, memory, flags
        self.received = self.received_bytes = self.sent_bytes = 0

    def meet(self, dtype: torch.dtype) -> None:
        """Load the kernels of hops between numbers of ``dtype``: while a step is recorded nothing can be loaded. No hop is on its way."""
        peer = (self.rank + 1) % self._places.count
        held = torch.zeros(LINE // dtype.itemsize, dtype=dtype, device=self._memory.device)
        torch.mul(held, 1, out=self.place(self.rank, peer, like=held))
        torch.mul(self.place(self.rank, peer, like=held), 1, out=held)

    def before(self, peer: int) -> WordHop:
        """From ``peer``, which has a layer before one of ours."""
        return WordHop(self, peer)

    def behind(self, peer: int) -> WordHop:
        """To ``peer``, which has a layer behind one of ours."""
        return WordHop(self, peer)

    def of(self, peer: int) -> WordHop:
        """To and from any rank."""
        return WordHop(self, peer)

    def expect(self, parts: int) -> None:
        """A recorded step is one part."""

    def word(self, sender: int, receiver: int) -> int:
        """Its address."""
        return self._words + self._places.word(sender, receiver)

    def place(self, sender: int, receiver: int, like: torch.Tensor) -> torch.Tensor:
        """Its memory, in the shape and type of ``like``. ValueError for more than a hop takes."""
        if like.nbytes > self._places.nbytes:
            raise ValueError(f"a hop of {like.nbytes} bytes, where {self._places.nbytes} have a place")
        begin = self._places.place(sender, receiver)
        return self._memory[begin : begin + like.nbytes].view(like.dtype).view(like.shape)

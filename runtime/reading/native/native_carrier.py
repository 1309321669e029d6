"""A card's copy stream as readers in C take it: they copy on what they have read."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from penstock.runtime.memory.bare_copies import DriverCalls
from penstock.runtime.memory.pieces import Segment
from penstock.runtime.reading.native.readers_library import ReadersLibrary

_NUMBER, _BEGUN = 5, 6
"""Words of ``struct carry`` that C writes."""


class Carry(NamedTuple):
    """What becomes of one read that has come. Keeps alive what C looks at."""

    words: array[int]
    """``struct carry``."""
    carrier: NativeCarrier
    segments: array[int]

    @property
    def number(self) -> int:
        """How many reads the carrier had carried with this one."""
        return self.words[_NUMBER]

    def refusal(self) -> RuntimeError:
        """Why it was not carried."""
        return RuntimeError(f"CUDA error: to queue a copy of what was read returned {-self.words[_NUMBER]}")

    @property
    def begun_ns(self) -> int:
        """When its copies were queued, by the monotonic clock."""
        return self.words[_BEGUN]


class NativeCarrier:
    """Queues by ``calls`` until :meth:`close`; see carry.h."""

    def __init__(self, library: ReadersLibrary, calls: DriverCalls):
        self._address = library.quick.carrier_open(*calls)
        if not self._address:
            raise MemoryError("no memory for a carrier")
        self._calls = calls
        self._close = library.waiting.carrier_close
        weakref.finalize(self, library.quick.carrier_free, self._address).atexit = False

    @staticmethod
    def words(segments: Sequence[Segment]) -> array[int]:
        """``struct segment`` of each."""
        return array("q", [word for s in segments for word in (s.src, s.dst, s.nbytes)])

    def carry(self, segments: array[int], to: int, event: int) -> Carry:
        """``segments``, as :meth:`words` gives them, to memory at ``to``; the driver's ``event`` is recorded behind them."""
        address, words = segments.buffer_info()
        return Carry(array("q", (self._address, address, words // 3, to, event, 0, 0)), self, segments)

    def close(self) -> None:
        """Returns when nothing is being queued; nothing is from then on."""
        self._close(self._address)

"""A card's copy stream as C takes it: readers copy on what they have read, and many copies are queued by one call."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Sequence

from penstock.runtime.memory.bare_copies import DriverCalls
from penstock.runtime.memory.pieces import Segment
from penstock.runtime.reading.native.readers_library import ReadersLibrary

MOVE_WORDS = 4
"""Of ``struct move``."""


class NativeCarrier:
    """Queues by ``calls`` until :meth:`close`; see carry.h."""

    def __init__(self, library: ReadersLibrary, calls: DriverCalls):
        self.address = library.quick.carrier_open(*calls)
        if not self.address:
            raise MemoryError("no memory for a carrier")
        self._calls = calls
        self._close, self._copy, self._awaits = library.waiting.carrier_close, library.quick.carrier_copy, library.quick.carrier_awaits
        self.has_word = bool(library.quick.carrier_has_word(self.address))
        """Whether kernels can wait for what has not been read."""
        weakref.finalize(self, library.quick.carrier_free, self.address).atexit = False

    @staticmethod
    def words(segments: Sequence[Segment]) -> array[int]:
        """``struct segment`` of each."""
        return array("q", [word for s in segments for word in (s.src, s.dst, s.nbytes)])

    def copy(self, moves: array[int], event: int) -> None:
        """Queue ``moves``, ``struct move`` one after the other, now; ``event`` is recorded behind them. RuntimeError where the driver
        refuses. From the thread that calls :meth:`close`."""
        address, words = moves.buffer_info()
        refused = self._copy(self.address, address, words // MOVE_WORDS, event)
        if refused:
            raise RuntimeError(f"CUDA error: to queue copies of experts returned {refused}")

    def awaits(self) -> bool:
        """Have kernels that are issued next wait for all that readers were asked to carry, and all that was queued before. False, and
        nothing is known, where they carry the last of it now, or have, or the driver refuses. From the thread that asked."""
        return bool(self._awaits(self.address))

    def close(self) -> None:
        """Returns when nothing is being queued; nothing is from then on, and no kernel waits for it."""
        self._close(self.address)

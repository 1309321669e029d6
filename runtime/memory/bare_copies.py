"""Copies given to the driver as addresses: torch's own take the host three times as long, and look at what is known here."""

from __future__ import annotations

import ctypes

OK = 0


class BareCopies:
    """Copies between page-locked memory and a card, asynchronous on a stream; of pageable memory the driver stages what it copies.

    The interpreter's lock is kept: a call takes 2 us, and whoever took the lock meanwhile would keep it for longer.
    """

    def __init__(self, stream: int):
        """``stream``: the driver's handle. Whoever calls this has the card's context current, as every thread has that uses torch."""
        self._stream = ctypes.c_void_p(stream)
        self._copy = ctypes.PyDLL("libcuda.so.1").cuMemcpyAsync
        self._copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]

    def __call__(self, into: int, source: int, nbytes: int) -> None:
        """Queue ``nbytes`` from address ``source`` to address ``into``. RuntimeError where the driver refuses."""
        code = self._copy(into, source, nbytes, self._stream)
        if code != OK:
            raise RuntimeError(f"CUDA error: cuMemcpyAsync returned {code}")

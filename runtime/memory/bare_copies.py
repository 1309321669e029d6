"""What the driver is asked by addresses, past torch: its copies take the host three times as long, and it has no waiting for a value."""

from __future__ import annotations

import ctypes

OK = 0
_AT_LEAST = 0
"""``CU_STREAM_WAIT_VALUE_GEQ``: the signed difference is not negative."""


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


def wait_for_value(stream: int, address: int, value: int) -> None:
    """What ``stream`` is given from now on begins once the 32 bits at ``address``, page-locked, are ``value`` or more. RuntimeError where
    the driver refuses."""
    wait = ctypes.PyDLL("libcuda.so.1").cuStreamWaitValue32_v2
    code = wait(ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(_AT_LEAST))
    if code != OK:
        raise RuntimeError(f"CUDA error: cuStreamWaitValue32 returned {code}")

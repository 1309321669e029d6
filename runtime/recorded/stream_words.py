"""What is asked of the driver about streams that are recorded, where torch has no name for it: words that they write and wait for, and
whether anything was recorded."""

from __future__ import annotations

import ctypes
from functools import cached_property

_EQUAL = 1  # CU_STREAM_WAIT_VALUE_EQ
_DRIVER = "libcuda.so.1"


class StreamWords:
    """``stream`` is a CUstream; ``address`` of 32 bits in page-locked memory or VRAM. While a stream is recorded these become nodes of the
    graph. RuntimeError where the driver refuses."""

    @cached_property
    def _driver(self) -> ctypes.CDLL:
        return ctypes.CDLL(_DRIVER)

    def write(self, stream: int, address: int, value: int) -> None:
        """``value``, behind all that ``stream`` was given, which is seen by then."""
        self._call("cuStreamWriteValue32_v2", stream, address, value, 0)

    def wait(self, stream: int, address: int, value: int) -> None:
        """What ``stream`` is given next begins once the word is ``value``."""
        self._call("cuStreamWaitValue32_v2", stream, address, value, _EQUAL)

    def _call(self, name: str, stream: int, address: int, value: int, flags: int) -> None:
        call = getattr(self._driver, name)
        code = call(ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(flags))
        if code:
            raise RuntimeError(f"{name}: CUDA error {code}")


def has_recorded(stream: int) -> bool:
    """Whether a stream that is being recorded was given anything since that began. RuntimeError where the driver refuses."""
    status, count = ctypes.c_int(), ctypes.c_size_t()
    call = ctypes.CDLL(_DRIVER).cuStreamGetCaptureInfo_v2
    code = call(ctypes.c_void_p(stream), ctypes.byref(status), None, None, None, ctypes.byref(count))
    if code:
        raise RuntimeError(f"cuStreamGetCaptureInfo: CUDA error {code}")
    return count.value > 0

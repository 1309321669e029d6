"""What the driver is asked by addresses, past torch: its copies take the host three times as long, and it has no waiting for a value.

The interpreter's lock is kept: a call takes 2 us, and whoever took the lock meanwhile would keep it for longer. Whoever calls has the
card's context current, as every thread has that uses torch.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, NamedTuple

import torch

OK = 0
_BESIDE_OTHERS = 1
"""``CU_STREAM_NON_BLOCKING``: it does not wait for the default stream."""
_AT_LEAST = 0
"""``CU_STREAM_WAIT_VALUE_GEQ``: the signed difference is not negative."""


class DriverCalls(NamedTuple):
    """What is called without Python to queue copies on a stream, and to have kernels wait for them: addresses of functions, of a context
    and of both streams.

    ``enter(context)``, ``copy(into, source, nbytes, stream)``, ``record(event, stream)``, ``wait(kernels, event, 0)``,
    ``write(stream, word, value, 0)``, ``until(kernels, word, value, 0)``; each returns 0, or what it refuses with. ``wait`` and ``until``
    are called by the thread that launches kernels.
    """

    enter: int
    context: int
    copy: int
    record: int
    stream: int
    wait: int
    kernels: int
    write: int = 0
    until: int = 0
    word: int = 0
    """Where 32 bits lie, page-locked and 0, that both sides see; 0 for none."""

    @classmethod
    def of(cls, stream: int, kernels: int, word: int) -> DriverCalls:
        """Of the calling thread's context."""
        context = ctypes.c_void_p()
        _check("cuCtxGetCurrent", _function("cuCtxGetCurrent", ctypes.c_void_p)(ctypes.addressof(context)))
        driver = ctypes.PyDLL("libcuda.so.1")
        names = (
            "cuCtxSetCurrent",
            "cuMemcpyAsync",
            "cuEventRecord",
            "cuStreamWaitEvent",
            "cuStreamWriteValue32_v2",
            "cuStreamWaitValue32_v2",
        )
        found = (ctypes.cast(getattr(driver, name), ctypes.c_void_p).value or 0 for name in names)
        enter, copy, record, wait, write, until = found
        return cls(enter, context.value or 0, copy, record, stream, wait, kernels, write, until, word)


class BareCopies:
    """Copies between page-locked memory and a card, asynchronous on a stream; of pageable memory the driver stages what it copies."""

    def __init__(self, stream: int):
        """``stream``: the driver's handle."""
        self._stream = ctypes.c_void_p(stream)
        self._copy = _function("cuMemcpyAsync", ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p)

    def __call__(self, into: int, source: int, nbytes: int) -> None:
        """Queue ``nbytes`` from address ``source`` to address ``into``. RuntimeError where the driver refuses."""
        _check("cuMemcpyAsync", self._copy(into, source, nbytes, self._stream))


class BareEvent:
    """An event of torch that is recorded again and again, on any stream. What is asked of a stream goes past torch, which gives the
    interpreter's lock away for it: beside a thread that launches kernels, it comes back late. RuntimeError where the driver refuses.
    One that is not ``timed`` keeps no time: streams wait for it sooner."""

    __slots__ = ("_handle", "event")

    def __init__(self, timed: bool = True) -> None:
        self.event: Any = torch.cuda.Event(enable_timing=timed, blocking=True)
        self._handle: int | None = None
        """Torch makes the driver's event when it records it first."""

    def handle(self, stream: Any) -> int:
        """The driver's, for whoever records it."""
        if self._handle is None:
            self.record(stream)
        assert self._handle is not None, "it is recorded"
        return self._handle

    def record(self, stream: Any) -> None:
        if self._handle is None:
            self.event.record(stream)
            self._handle = self.event.cuda_event
        else:
            self.record_again(stream.cuda_stream)

    def record_again(self, stream: int) -> None:
        """On a stream by its handle of the driver's, where it was recorded before."""
        _check("cuEventRecord", _record()(self._handle, stream))

    def wait(self, stream: Any) -> None:
        """What ``stream`` is given from now on begins after it."""
        self.hold(stream.cuda_stream)

    def hold(self, stream: int) -> None:
        """The same of a stream by its handle of the driver's."""
        _check("cuStreamWaitEvent", _wait()(stream, self._handle, 0))

    def synchronize(self) -> None:
        self.event.synchronize()

    def query(self) -> bool:
        return bool(self.event.query())

    def elapsed_time(self, end: Any) -> float:
        """Milliseconds until ``end``, another one or an event of torch."""
        return float(self.event.elapsed_time(end.event if isinstance(end, BareEvent) else end))


def made_stream() -> int:
    """The driver's handle of a stream that nobody else is given, of the highest priority. RuntimeError where the driver refuses."""
    least, most, stream = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
    _check(
        "cuCtxGetStreamPriorityRange",
        _function("cuCtxGetStreamPriorityRange", ctypes.c_void_p, ctypes.c_void_p)(ctypes.addressof(least), ctypes.addressof(most)),
    )
    make = _function("cuStreamCreateWithPriority", ctypes.c_void_p, ctypes.c_uint, ctypes.c_int)
    _check("cuStreamCreateWithPriority", make(ctypes.addressof(stream), _BESIDE_OTHERS, most.value))
    return stream.value or 0


def unmade_stream(stream: int) -> None:
    """Nothing is given to it any more. RuntimeError where the driver refuses."""
    _check("cuStreamDestroy", _function("cuStreamDestroy_v2", ctypes.c_void_p)(stream))


def wait_for_value(stream: int, address: int, value: int) -> None:
    """What ``stream`` is given from now on begins once the 32 bits at ``address``, page-locked, are ``value`` or more. RuntimeError where
    the driver refuses."""
    _check("cuStreamWaitValue32", _wait_value()(stream, address, value, _AT_LEAST))


def write_value(stream: int, address: int, value: int) -> None:
    """The 32 bits at ``address``, page-locked, become ``value`` behind all that ``stream`` was given, which everybody sees by then.
    RuntimeError where the driver refuses."""
    _check("cuStreamWriteValue32", _write_value()(stream, address, value, 0))


@cache
def _record() -> Any:
    return _function("cuEventRecord", ctypes.c_void_p, ctypes.c_void_p)


@cache
def _wait() -> Any:
    return _function("cuStreamWaitEvent", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)


@cache
def _wait_value() -> Any:
    return _function("cuStreamWaitValue32_v2", ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)


@cache
def _write_value() -> Any:
    return _function("cuStreamWriteValue32_v2", ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)


@cache
def _function(name: str, *takes: Any) -> Any:
    """Of the driver."""
    found = getattr(ctypes.PyDLL("libcuda.so.1"), name)
    found.argtypes = takes
    return found


def _check(name: str, code: int) -> None:
    if code != OK:
        raise RuntimeError(f"CUDA error: {name} returned {code}")

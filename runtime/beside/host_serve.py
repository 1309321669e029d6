"""A recorded step's units on the CPU: done as the card asks for them, without the interpreter."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType

import torch

from penstock.runtime.beside.host_ffn import HostFfn
from penstock.runtime.beside.host_library import CUnit, products_library

FLAG_WORDS = 16
"""int32 from one flag to the next: each has 64 bytes for itself."""


def flags(count: int) -> torch.Tensor:
    """``count`` flags at zero, int32 [count, FLAG_WORDS]; the first word of each row is the flag."""
    return torch.zeros(count, FLAG_WORDS, dtype=torch.int32)


class HostServe:
    """``units``, in the order in which each step asks for them. Made by :meth:`HostPool.serve`.

    Between :meth:`begin_step` and a step's last unit the pool's threads spin; 20 ms after a unit they nap by 50 µs. Unit i begins when
    ``ask[i]`` becomes 1. Its rows of ``x`` are read; ``y`` is written; then ``ask[i]`` becomes 0 and ``done[i]`` 1. Whoever asks clears
    ``done[i]``. Rows lie one behind the other from the buffers' first byte: ``x`` [rows, inputs], ``y`` [rows, outputs], of the
    units' dtype. Where ``at`` is given, those of ``y`` begin at its element ``at[i]``: units that are asked for at once need places of
    their own.
    """

    def __init__(
        self,
        pool: int,
        units: Sequence[HostFfn],
        rows: int,
        ask: torch.Tensor,
        done: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        near: torch.Tensor | None = None,
        at: Sequence[int] | None = None,
    ) -> None:
        """Raises ValueError for buffers that are too small for ``rows`` rows, or no plain memory of the CPU."""
        places = [0] * len(units) if at is None else list(at)
        for unit, place in zip(units, places, strict=True):
            _check(x, unit.dtype, rows * unit.inputs, "x")
            _check(y, unit.dtype, place + rows * unit.outputs, "y")
        for tensor, name in ((ask, "ask"), (done, "done"), (near, "near")):
            if tensor is not None:
                _check(tensor, torch.int32, FLAG_WORDS * len(units), name)
        if rows < 1 or not units:
            raise ValueError(f"{len(units)} units of {rows} rows: there must be one of each at least")
        self.units, self.rows = tuple(units), rows
        self._kept = (ask, done, near, x, y)
        self._library, self._pool = products_library(), pool
        in_c = (CUnit * len(units))(*(unit.in_c() for unit in units))
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in self._kept)
        places_in_c = (ctypes.c_int64 * len(units))(*places)
        self._served: int | None = self._library.served_open(len(units), in_c, rows, *pointers, places_in_c)
        if not self._served:
            raise MemoryError("the CPU's units got no scratch memory")
        self._begun = False
        self._unclosed = weakref.finalize(self, _let_go, self._library.pool_abandon, pool, self._served, os.getpid())

    def begin_step(self, rows: int | None = None) -> None:
        """The card will ask for all units, in order, with so many rows: all that the buffers hold where it is not said.

        Raises RuntimeError if the step before has not ended.
        """
        if rows is not None and not 1 <= rows <= self.rows:
            raise ValueError(f"{rows} rows, where the buffers hold 1 to {self.rows}")
        if not self.ended:
            left = sum(not ended for _, ended in self.times())
            raise RuntimeError(f"the card has not asked for {left} of the {len(self.units)} units of the step before")
        self._begin(self.rows if rows is None else rows)
        self._begun = True

    def _begin(self, rows: int) -> None:
        self._library.pool_step(self._pool, self._open, rows)

    @property
    def ended(self) -> bool:
        """Whether all units of the last step are done."""
        return not self._begun or bool(self._library.served_over(self._open))

    def times(self) -> list[tuple[float, float]]:
        """Begin and end of each unit in the last step, seconds of ``perf_counter``; 0 for what was not done."""
        numbers = (ctypes.c_int64 * (2 * len(self.units)))()
        self._library.served_tell(self._open, numbers)
        return [(begun / 1e9, ended / 1e9) for begun, ended in zip(numbers[::2], numbers[1::2], strict=True)]

    def abandon(self) -> None:
        """Of a step that will ask for no more: threads finish the unit that they are at, and rest."""
        if self._served and not self.ended:
            self._leave(self._served)
        self._begun = False

    def _leave(self, served: int) -> None:
        self._library.pool_abandon(self._pool, served)

    def close(self) -> None:
        """Abandon what is not done, and free memory."""
        self.abandon()
        self._unclosed.detach()
        if self._served:
            self._rest()
            self._library.served_close(self._served)
            self._served = None

    def _rest(self) -> None:
        self._library.pool_rest(self._pool)

    @property
    def _open(self) -> int:
        if not self._served:
            raise ValueError("the served units are closed")
        return self._served

    def __enter__(self) -> HostServe:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class WokenServe(HostServe):
    """The same of a pool whose threads sleep between two units, since those of other ranks have the same cores.

    Whoever asks sets ``near[i]`` some time before ``ask[i]``. Each step begins with all of them at 0. The thread ``looker`` looks every
    50 µs for the next of both words, and wakes the pool, whose threads then spin for ``ask[i]``. A unit that was not said to be near is
    done, too, but waits until the pool is awake.
    """

    def __init__(
        self,
        pool: int,
        looker: int,
        units: Sequence[HostFfn],
        rows: int,
        ask: torch.Tensor,
        done: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        near: torch.Tensor,
    ) -> None:
        super().__init__(pool, units, rows, ask, done, x, y, near)
        self._looker = looker
        self._unclosed.detach()
        self._unclosed = weakref.finalize(self, _let_go, self._library.looker_abandon, looker, self._open, os.getpid())

    def _begin(self, rows: int) -> None:
        self._library.looker_step(self._looker, self._open, rows)

    def _leave(self, served: int) -> None:
        self._library.looker_abandon(self._looker, served)

    def _rest(self) -> None:
        self._library.looker_rest(self._looker)
        super()._rest()


def _let_go(abandon: Callable[[int, int], None], whom: int, served: int, process: int) -> None:
    """Of a step that nobody closes, as where an interrupt ends the interpreter: threads leave its memory before that is freed. A process
    that was forked has none of them."""
    if os.getpid() == process:
        abandon(whom, served)


def _check(tensor: torch.Tensor, dtype: torch.dtype, least: int, name: str) -> None:
    if tensor.dtype != dtype or tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.numel() < least:
        kind = f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)} on {tensor.device}"
        raise ValueError(f"{name} is {kind}, where {least} contiguous {dtype} on the CPU are needed")

"""Threads that compute units on the CPU, from where their bytes lie."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple

import torch

from penstock.planner.common.errors import UserError
from penstock.planner.common.host_memory import usable_cores
from penstock.planner.common.threads import best_cores, most_threads, thread_cache_bytes
from penstock.runtime.beside.host_ffn import NUMBERS, HostFfn, host_linear, host_read
from penstock.runtime.beside.host_library import CAttend, Level, machine_level, products_library
from penstock.runtime.beside.host_matrix import HostMatrix
from penstock.runtime.beside.host_serve import HostServe, WokenServe

NEAR_S = 0.005
AHEAD_OF = 2
"""One part in so many of a thread's cache: of what is read meanwhile, and of inputs, it keeps some, too."""
_NO_SCRATCH = "the CPU's products got no scratch memory"


@dataclass(frozen=True)
class PoolTold:
    """What a pool did so far."""

    busy_s: float
    """From the first thread's begin of each unit to the last one's end."""
    bytes: int
    """Of weights, read by those units."""
    pinned: int
    """Threads that got the core that they asked for."""
    level: Level


class UnitRows(NamedTuple):
    """A unit's input and output rows, looked at once: who starts units over the same rows again and again does so beforehand."""

    x: torch.Tensor
    out: torch.Tensor
    height: int
    inputs: int
    outputs: int
    x_at: int
    out_at: int
    dtype: torch.dtype

    @classmethod
    def of(cls, x: torch.Tensor, out: torch.Tensor) -> UnitRows:
        """Of ``x`` [rows, inputs] and ``out`` [rows, outputs]. ValueError unless both are plain BF16 or F16 on the CPU, of as many rows."""
        (height, inputs), (made, outputs) = _plain(x), _plain(out)
        if made != height:
            raise ValueError(f"{height} input rows for {made} output rows")
        if x.dtype != out.dtype:
            raise ValueError(f"input rows of {x.dtype} for output rows of {out.dtype}")
        return cls(x, out, height, inputs, outputs, x.data_ptr(), out.data_ptr(), x.dtype)

    def check(self, ffn: HostFfn) -> None:
        """ValueError unless they are rows of ``ffn``."""
        for mine, its in ((self.inputs, ffn.inputs), (self.outputs, ffn.outputs)):
            if mine != its:
                raise ValueError(f"rows of {mine}, where the layer has {its}")
        if self.dtype != ffn.dtype:
            raise ValueError(f"rows of {self.dtype}, where the layer computes with {ffn.dtype}")


class Ticket(NamedTuple):
    """A unit that was started. Its tensors stay as long as this does; the pool needs them until it is waited for."""

    number: int
    ffn: HostFfn
    rows: UnitRows


class HostPool:
    """``threads`` threads, pinned to ``cores``, which do one unit after the other, each unit all together.

    Where ``cores`` are not given they are this process's best ones (:func:`best_cores`); more threads than it has cores are not pinned.

    They spin for 50 µs after a unit, or while one is :meth:`near`, and sleep otherwise. Scratch memory: some 16 bytes for each input row
    and column of the widest layer. Calls release the interpreter's lock. Raises UserError where the products are not compiled, or the
    threads cannot be made. ``level`` holds the instruction set below :func:`machine_level`.

    ``ahead_bytes``: what each thread may read ahead of a served unit's rows while it waits, into its core's cache; where it is not given,
    half of that (:func:`thread_cache_bytes`).

    With ``joined`` one of the threads is whoever calls :meth:`ffn` or :meth:`attend`: for a caller that would do nothing meanwhile but take
    a core while it waits. Such a pool has neither :meth:`start` nor :meth:`serve`, and pins no thread unless ``cores`` are given.
    """

    def __init__(
        self,
        threads: int,
        cores: Sequence[int] | None = None,
        level: Level | None = None,
        joined: bool = False,
        ahead_bytes: int | None = None,
    ) -> None:
        if cores is not None and len(cores) < threads:
            raise ValueError(f"{len(cores)} cores for {threads} threads")
        self.threads, self.joined = threads, joined
        self.ahead_bytes = thread_cache_bytes() // AHEAD_OF if ahead_bytes is None else ahead_bytes
        best = (best_cores() if not joined else []) if cores is None else list(cores)
        self._library = products_library()
        where = (ctypes.c_int64 * threads)(*(best[:threads] if len(best) >= threads else [-1] * threads))
        self._looker: int | None = None
        held = machine_level() if level is None else level
        self._pool: int | None = self._library.pool_open(threads, where, held, joined, self.ahead_bytes)
        if not self._pool:
            raise UserError(f"{threads} threads for the CPU's products cannot be made: ask for fewer, from 1 to 256")

    def product(self, matrix: HostMatrix, x: torch.Tensor, out: torch.Tensor) -> None:
        """``out`` [rows, matrix.rows] = ``x`` [rows, matrix.columns] times the matrix, transposed; both BF16 or both
        F16 on the CPU."""
        rows = UnitRows.of(x, out)
        self.ffn(host_linear(matrix, dtype=rows.dtype), x, out)

    def ffn(self, ffn: HostFfn, x: torch.Tensor, out: torch.Tensor) -> None:
        """``out`` [rows, ffn.outputs] of ``x`` [rows, ffn.inputs]; both of ``ffn.dtype`` on the CPU."""
        if not self.joined:
            self.wait(self.start(ffn, UnitRows.of(x, out)))
            return
        rows = UnitRows.of(x, out)
        rows.check(ffn)
        if self._library.pool_do(self._open, ffn.in_c(), rows.height, rows.x_at, rows.out_at) < 0:
            raise MemoryError(_NO_SCRATCH)

    def attend(self, asked: CAttend) -> None:
        """Attention over pages, whose tensors stay until this returns; by whoever calls, too, also where the pool is not ``joined``."""
        if self._library.pool_attend(self._open, asked) < 0:
            raise MemoryError(_NO_SCRATCH)

    def attend_asked(self, asked: CAttend, ask: int, done: int, turn: int, times: int) -> None:
        """The same once the 32 bits at address ``ask`` are ``turn`` or later, which a card writes; returns at once. Behind the results
        those at ``done`` become ``turn``, and two int64 at ``times`` its begin and end, ns of ``perf_counter``. What it reads and writes
        must stay until then. A pool that is closed lets go of what was not asked for, and says that it is done."""
        if self.joined:
            raise ValueError("nothing is asked of a pool whose caller computes, too")
        if self._library.pool_attend_asked(self._open, asked, ask, done, turn, times) < 0:
            raise MemoryError(_NO_SCRATCH)

    def read(self, memory: torch.Tensor) -> None:
        """Bring whole pages of 4096 bytes of ``memory`` into registers, and no more: the most that these threads get of it."""
        seen = ctypes.c_uint64()
        if self.joined:
            self._library.pool_do(self._open, host_read(memory), 0, None, ctypes.addressof(seen))
            return
        number = self._library.pool_start(self._open, host_read(memory), 0, None, ctypes.addressof(seen), None, 0)
        self._library.pool_wait(self._open, number)

    def start(self, ffn: HostFfn, rows: UnitRows, flag: int | None = None, value: int = 0) -> Ticket:
        """Have ``rows.out`` computed after what was started before. ``rows.x`` must stay as it is until :meth:`wait`. Behind the results
        the 32 bits at address ``flag`` become ``value``, which a card may wait for."""
        if self.joined:
            raise ValueError("nothing is started in a pool whose caller computes, too")
        rows.check(ffn)
        number = self._library.pool_start(self._open, ffn.in_c(), rows.height, rows.x_at, rows.out_at, flag, value)
        if number < 0:
            raise MemoryError(_NO_SCRATCH)
        return Ticket(number, ffn, rows)

    def wait(self, ticket: Ticket) -> None:
        """Until the ticket's ``out`` is written."""
        self._library.pool_wait(self._open, ticket.number)

    def serve(
        self,
        units: Sequence[HostFfn],
        rows: int,
        hidden: int,
        ask: torch.Tensor,
        done: torch.Tensor,
        x: torch.Tensor,
        y: torch.Tensor,
        near: torch.Tensor | None = None,
        at: Sequence[int] | None = None,
    ) -> HostServe:
        """Threads for a recorded step's units, as :class:`HostServe` says; close it before the pool. With ``near`` they sleep between two
        units, as :class:`WokenServe` says, and the pool has one thread more.

        ``ask``, ``done``, ``near``: int32 flags, 64 bytes apart; ``x``, ``y``: of the units' dtype, ``rows`` rows at least; ``at``: where
        in ``y`` a unit's begin, else all at its first element, and all of them there with ``near``. Raises ValueError where a unit does
        not take rows of ``hidden`` columns.
        """
        if self.joined:
            raise ValueError("nothing is served by a pool whose caller computes, too")
        for unit in units:
            if unit.inputs != hidden:
                raise ValueError(f"a unit takes rows of {unit.inputs}, where the step's have {hidden}")
        if near is None:
            return HostServe(self._open, units, rows, ask, done, x, y, at=at)
        return WokenServe(self._open, self._looking(), units, rows, ask, done, x, y, near)

    def _looking(self) -> int:
        """The thread that looks while the others sleep. UserError where it cannot be made."""
        if self._looker is None:
            self._looker = self._library.looker_open(self._open)
        if not self._looker:
            self._looker = None
            raise UserError("a thread that wakes those of the CPU's products cannot be made: raise the limit of threads (ulimit -u)")
        return self._looker

    def near(self, seconds: float = NEAR_S) -> None:
        """A unit comes within so many seconds: threads wake up and spin for it. 0 lets them sleep."""
        self._library.pool_near(self._open, int(seconds * 1e9))

    def told(self) -> PoolTold:
        """What was done so far."""
        numbers = (ctypes.c_int64 * 4)()
        self._library.pool_tell(self._open, numbers)
        return PoolTold(numbers[0] / 1e9, numbers[1], numbers[2], Level(numbers[3]))

    def close(self) -> None:
        """End the threads, after what was started."""
        if self._looker is not None:
            self._library.looker_close(self._looker)
            self._looker = None
        if self._pool:
            self._library.pool_close(self._pool)
            self._pool = None

    @property
    def _open(self) -> int:
        if not self._pool:
            raise ValueError("the pool is closed")
        return self._pool

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def pool_here(threads: int, ahead_bytes: int, tell: Callable[[str], None] = lambda line: None) -> HostPool:
    """The pool that a plan has ``threads`` for, each of which reads ``ahead_bytes`` ahead; of fewer where this process has fewer cores than
    the plan's machine: threads that spin must not wait for each other's core. ``tell`` gets the line that says so."""
    here = min(threads, most_threads())
    if here < threads:
        tell(
            f"{here} of {threads} threads: the CPU's units were planned for more cores than the {usable_cores()} that this process may use;"
            " raise the container's quota or the affinity, or run `planner probe` within them and plan anew"
        )
    return HostPool(here, ahead_bytes=ahead_bytes)


def _plain(tensor: torch.Tensor) -> tuple[int, int]:
    """Its rows and columns."""
    if tensor.dtype not in NUMBERS or tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.ndim != 2:
        raise ValueError(
            f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)} on {tensor.device} is no plain [rows, columns] of BF16 or F16"
        )
    return tensor.shape[0], tensor.shape[1]

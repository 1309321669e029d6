"""What the CPU, the link and the bus between them give, measured in the process that ran plans: the parts of a hybrid step's bound."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING

from penstock.planner.common.errors import UserError
from penstock.planner.common.host_memory import uncached_bytes
from penstock.planner.common.measures import ALIGN, GB, align_up
from penstock.planner.probe.dram_rates import Arena, Lock, mlock
from penstock.planner.probe.gpu_rates import Gpu, host_register

if TYPE_CHECKING:
    from penstock.runtime.beside.host_matrix import HostMatrix

ROWS, COLUMNS = 14336, 4096
"""An FFN matrix of an 8B model."""
LEAST_BYTES = 2 << 30
"""Of memory that is read and copied."""
PIECE_BYTES = 64 << 20
"""Read at a time."""
Pair = tuple[float, float]


@dataclass(frozen=True)
class Rates:
    """GB/s, each the mean of one stretch of time. ``link_gbps`` is 0 without a card."""

    read_gbps: float
    """A plain read by as many threads."""
    link_gbps: float
    cpu_gbps: Mapping[str, float]
    """Format -> stored bytes by products of one row, the link idle."""
    beside: Mapping[str, tuple[float, float]]
    """Format -> the same beside copies, and the copies."""
    read_beside: tuple[float, float]
    """The plain read beside copies, and the copies."""

    def bus_gbps(self, format: str) -> float:
        """CPU and link together: the most that was measured, by products or by plain reads."""
        return max(sum(self.beside[format]), sum(self.read_beside), self.cpu_gbps[format], self.read_gbps)


ASKING = 2
"""Threads that ask for products: while one waits the next product is posted already. A call from Python takes some share of a matrix in
4 bits, which a step's units do not wait for: the card asks for them, and what that takes is ``hop_s``."""


class Busy:
    """``acts``, each of which reads ``nbytes``, are done in turns, over and over, while the ``with`` block runs; the next one is asked for
    before one has ended."""

    def __init__(self, acts: Sequence[Callable[[], None]], nbytes: int):
        self._turn, self._nbytes = cycle(acts), nbytes
        self._stop = threading.Event()
        self._done: list[float] = []
        self._threads = [threading.Thread(target=self._do) for _ in range(ASKING)]

    def __enter__(self) -> Busy:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def going(self) -> bool:
        return all(thread.is_alive() for thread in self._threads)

    def gbps_within(self, start: float, end: float) -> float:
        """GB/s between two readings of ``time.perf_counter``."""
        return sum(start < at <= end for at in self._done) * self._nbytes / GB / (end - start)

    def _do(self) -> None:
        while not self._stop.is_set():
            next(self._turn)()
            self._done.append(time.perf_counter())


def measure_rates(formats: Sequence[str], threads: int, seconds: float) -> Rates:
    """Each rate for about ``seconds``. Takes :func:`uncached_bytes` of DRAM, 2.1 GB at least, and as much for each format, one after the
    other, and gives them back."""
    import torch

    from penstock.runtime.beside.host_pool import HostPool

    gpu = Gpu(torch.cuda.current_device()) if torch.cuda.is_available() else None
    lock: Lock = host_register() if gpu else mlock()
    with closing(_Arena(threads, lock)) as held, closing(HostPool(threads)) as pool:
        copying = None if gpu is None else partial(gpu.feeding, held.arena, seconds)
        link = 0.0 if copying is None else copying(lambda: True)[0]
        memory = torch.frombuffer(held.arena.buffer, dtype=torch.uint8)
        pieces = memory[: memory.numel() // PIECE_BYTES * PIECE_BYTES].split(PIECE_BYTES)
        read, read_beside = _both(Busy([partial(pool.read, piece) for piece in pieces], PIECE_BYTES), seconds, copying)
        alone: dict[str, float] = {}
        beside: dict[str, tuple[float, float]] = {}
        for format in formats:
            matrices = _matrices(format, threads)
            x = torch.randn(1, matrices[0].columns, dtype=torch.bfloat16)
            out = torch.empty(1, matrices[0].rows, dtype=torch.bfloat16)
            acts = [partial(pool.product, matrix, x, out) for matrix in matrices]
            alone[format], beside[format] = _both(Busy(acts, matrices[0].bytes), seconds, copying)
    return Rates(read, link, alone, beside, read_beside)


def link_rate(threads: int, seconds: float) -> float:
    """GB/s of copies to the card with the bus idle, for about ``seconds``; 0 without a card. Takes as much DRAM and gives it back."""
    import torch

    if not torch.cuda.is_available():
        return 0.0
    with closing(_Arena(threads, host_register())) as held:
        return Gpu(torch.cuda.current_device()).feeding(held.arena, seconds, lambda: True)[0]


def attention_rates(threads: int, sequences: int, tokens: int, seconds: float) -> tuple[float, float]:
    """GB/s of a plain read, and of K and V by attention of one token each of ``sequences`` over ``tokens``. Takes as much DRAM."""
    from penstock.runtime.beside.host_pool import HostPool
    from penstock.runtime.timed.attention_times import KvLayers
    from penstock.runtime.timed.decoder_times import Stretch

    layers = KvLayers(sequences, tokens, Stretch(uncached_bytes()).memory)
    with closing(HostPool(threads)) as pool:
        reads = cycle([states for pair in layers.held for states in pair])
        pool.read(next(reads))
        done, begun = 0, time.perf_counter()
        while time.perf_counter() < begun + seconds:
            pool.read(next(reads))
            done += 1
        read = done * layers.nbytes / 2e9 / (time.perf_counter() - begun)
        return read, layers.attention_gbps(pool, seconds)


def _both(busy: Busy, seconds: float, copying: Callable[[Callable[[], bool]], tuple[float, float, float]] | None) -> tuple[float, Pair]:
    """GB/s alone; GB/s beside copies, and the copies."""
    with busy:
        start = time.perf_counter()
        time.sleep(seconds)
        alone = busy.gbps_within(start, time.perf_counter())
        if copying is None:
            return alone, (alone, 0.0)
        copied, start, end = copying(busy.going)
        return alone, (busy.gbps_within(start, end), copied)


class _Arena:
    """All zero, faulted in and page-locked."""

    def __init__(self, threads: int, lock: Lock):
        self.arena, self._lock = Arena(max(LEAST_BYTES, uncached_bytes()), threads), lock
        self.arena.fault_in()
        self.arena.locked = lock.lock(self.arena.address, self.arena.nbytes) is None

    def close(self) -> None:
        self.arena.close(self._lock)


def _matrices(format: str, threads: int) -> list[HostMatrix]:
    """Matrices of random bits in memory of huge pages, as an engine's, which they keep. UserError for a format that the CPU does not
    multiply by as it is stored."""
    import torch

    from penstock.runtime.beside.host_matrix import host_matrix_of
    from penstock.runtime.timed.decoder_times import parts_of, samples

    plain = {"BF16": {"weight": ((ROWS, COLUMNS), torch.bfloat16)}}
    known = {**plain, **samples(ROWS)}
    alike = next((name for name in (format, *known) if name in known and name.partition("-")[0] == format.partition("-")[0]), "")
    parts = parts_of(known[alike], torch.device("cpu")) if alike else {}
    one = host_matrix_of(format, parts) if parts else None
    if one is None:
        raise UserError(f"{format}: the CPU has no product with it as it is stored; choose a checkpoint in another format")
    each = sum(align_up(part.nbytes, ALIGN) for part in parts.values())
    count = max(2, uncached_bytes() // each)
    memory = torch.frombuffer(Arena(count * each + (2 * threads << 21), threads).buffer, dtype=torch.uint8)
    found, at = [], 0
    for _ in range(count):
        placed = {}
        for leaf, part in parts.items():
            placed[leaf] = memory[at : at + part.nbytes].view(part.dtype).view(part.shape)
            placed[leaf].copy_(part)
            at += align_up(part.nbytes, ALIGN)
        made = host_matrix_of(format, placed)
        assert made is not None
        found.append(made)
    return found

"""What the machine can do at best, measured in the run's own process with the run's own buffers: the limit beside the result."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median

from penstock.planner.common.measures import GB
from penstock.runtime.engine.engine import Engine
from penstock.runtime.engine.passes.generate import Batch
from penstock.runtime.experts.expert_room import ExpertHost
from penstock.runtime.memory.device import Event
from penstock.runtime.moving.filler import Arrival

SECONDS = 1.5
"""Least time of one measurement."""
WINDOW_S = 0.2
"""Least time of one window of it."""
REHEARSALS = 3

Read = Callable[[int, Arrival], None]
"""Begins one into a slot."""
Until = Callable[[], bool]
"""Whether a measurement has lasted long enough."""


def measure_limits(engine: Engine) -> dict[str, float]:
    """What the links give, each alone: ``ssd_gbps`` and, with a GPU, ``h2d_gbps``; where the SSD is read beside copies, also both at
    once: ``ssd_beside_h2d_gbps`` and ``h2d_beside_ssd_gbps``. Of experts also ``ssd_one_gbps``: each is asked for when the one before has
    come, as a step does.

    Overwrites the DRAM cache's slots and one slot of VRAM: before loading or after the end.
    """
    limits = {"ssd_gbps": _ssd_gbps(engine, _lasting(SECONDS))} if engine.dram.layers or engine.reads_ssd else {}
    experts = engine.host.experts
    if experts is not None and experts.room.reads:
        limits["ssd_one_gbps"] = _read_gbps(engine, _experts(experts), 1, _lasting(SECONDS))
    if engine.link_target is not None:
        limits["h2d_gbps"] = _h2d_gbps(engine, _lasting(SECONDS))
        if engine.reads_ssd:
            limits |= _both(engine)
    return limits


def link_gbps(engine: Engine) -> float | None:
    """What the link to this process's card gives, alone or beside those of other ranks that measure now; None where nothing streams."""
    return None if engine.link_target is None else _h2d_gbps(engine, _lasting(SECONDS))


def measure_compute(engine: Engine, batch: Batch) -> dict[str, float]:
    """Seconds of a prefill and of the last decode step of ``batch`` with nothing to wait for, medians over rehearsals. After the
    stream's end."""
    prefills, steps = zip(*(engine.rehearse(batch) for _ in range(REHEARSALS)), strict=True)
    return {"prefill_s": median(prefills), "decode_s": median(steps)}


def _lasting(seconds: float) -> Until:
    begun = time.perf_counter()
    return lambda: time.perf_counter() - begun >= seconds


def _both(engine: Engine) -> dict[str, float]:
    """Copies run as long as the reads do: each disturbs the other all the time."""
    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(_ssd_gbps, engine, _lasting(SECONDS))
        h2d_gbps = _h2d_gbps(engine, reading.done)
        return {"ssd_beside_h2d_gbps": reading.result(), "h2d_beside_ssd_gbps": h2d_gbps}


def _ssd_gbps(engine: Engine, over: Until) -> float:
    """The reader pool kept full with the plan's own layers, else experts."""
    return _read_gbps(engine, *_reads(engine), over)


def _read_gbps(engine: Engine, reads: Sequence[Read], count: int, over: Until) -> float:
    """Of ``reads`` into ``count`` slots of the arena, by the plan's blocks and depth, O_DIRECT."""
    slots = deque(range(count))
    waiting: deque[tuple[Arrival, int]] = deque()
    begun, first = time.perf_counter(), engine.pool.meter.bytes
    for read in itertools.cycle(reads):
        if not slots:
            arrival, slot = waiting.popleft()
            arrival.wait()
            slots.append(slot)
            if over():
                break
        arrival = Arrival()
        waiting.append((arrival, slots.popleft()))
        read(waiting[-1][1], arrival)
    for arrival, _ in waiting:
        arrival.wait()
    return (engine.pool.meter.bytes - first) / (time.perf_counter() - begun) / GB


def _reads(engine: Engine) -> tuple[Sequence[Read], int]:
    """What starts a read into a slot, of each layer or expert, and how many slots there are."""
    experts = engine.host.experts
    if engine.dram.layers or experts is None:
        return [partial(engine.dram.read_into, layer) for layer in engine.dram.layers], engine.dram.slots
    return _experts(experts), max(1, experts.room.dram_slots)


def _experts(experts: ExpertHost) -> Sequence[Read]:
    return [partial(experts.dram.read_into, key) for key in experts.dram.keys]


def _h2d_gbps(engine: Engine, over: Until) -> float:
    """Copy chunk after chunk of the arena into a ring slot, with the plan's chunk size and copies in flight. Returns the median rate over
    windows of a step's size, by device time. A step's median and this one then suffer the same disturbances."""
    copier, (chunk, in_flight) = engine.copier, engine.chunking
    dst = engine.link_target
    assert copier is not None and dst is not None, "there is a link only where there is a card"
    size = min(chunk, dst.numel())
    queued: deque[Event] = deque()
    times: list[float] = []
    first = copier.copy_event()
    for start in itertools.cycle(range(0, engine.arena.nbytes - size + 1, size)):
        with copier.copying():
            copier.copy(dst[:size], engine.arena.slice(start, size))
        queued.append(copier.copy_event())
        if len(queued) > in_flight:
            event = queued.popleft()
            copier.host_waits(event)
            times.append(copier.time_of(event))
            if over():
                break
    copier.host_waits(queued[-1])
    return median(_window_gbps([copier.time_of(first), *times], size))


def _window_gbps(times: Sequence[float], nbytes: int) -> list[float]:
    """Rates of consecutive windows of at least ``WINDOW_S``, where ``nbytes`` moved between neighbours of ``times``."""
    rates, start = [], 0
    for end in range(1, len(times)):
        if times[end] - times[start] >= WINDOW_S:
            rates.append((end - start) * nbytes / (times[end] - times[start]) / GB)
            start = end
    return rates or [(len(times) - 1) * nbytes / (times[-1] - times[0]) / GB]

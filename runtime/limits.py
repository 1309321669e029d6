"""What the machine can do at best, measured in the run's own process with the run's own buffers: the limit beside the result."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Sequence
from statistics import median

from planner.units import GB
from runtime.engine import Engine
from runtime.load import Arrival

SECONDS = 1.5
"""Least time of one measurement."""
WINDOW_S = 0.2
"""Least time of one window of it."""


def measure_limits(engine: Engine) -> dict[str, float]:
    """``ssd_gbps`` and, with a GPU, ``h2d_gbps``. Overwrites the DRAM cache's slots and one ring slot: before loading or after the end."""
    limits = {}
    if engine.dram.layers:
        limits["ssd_gbps"] = _ssd_gbps(engine)
    if engine.ring is not None and engine.dram.layers:
        limits["h2d_gbps"] = _h2d_gbps(engine)
    return limits


def _ssd_gbps(engine: Engine) -> float:
    """The reader pool kept full with the plan's own layers, blocks and depth, O_DIRECT, into the arena; nothing else runs."""
    slots = deque(range(engine.dram.slots))
    waiting: deque[tuple[Arrival, int]] = deque()
    meter = engine.pool.meter
    begun, first = time.perf_counter(), meter.bytes
    for layer in itertools.cycle(engine.dram.layers):
        if not slots:
            arrival, slot = waiting.popleft()
            arrival.wait()
            slots.append(slot)
            if time.perf_counter() - begun >= SECONDS:
                break
        arrival = Arrival()
        waiting.append((arrival, slots.popleft()))
        engine.dram.read_into(layer, waiting[-1][1], arrival)
    for arrival, _ in waiting:
        arrival.wait()
    return (meter.bytes - first) / (time.perf_counter() - begun) / GB


def _h2d_gbps(engine: Engine) -> float:
    """Chunk after chunk of the arena into a ring slot, the plan's chunk size and copies in flight: the median over windows of the size
    of a step, by device time. A step's median and this one then suffer the same disturbances."""
    copier, (chunk, in_flight) = engine.copier, engine.chunking
    dst = engine.ring.largest_slot
    size = min(chunk, dst.numel())
    queued: deque = deque()
    times: list[float] = []
    begun = time.perf_counter()
    first = copier.copy_event()
    for start in itertools.cycle(range(0, engine.arena.nbytes - size + 1, size)):
        copier.copy(dst[:size], engine.arena.slice(start, size))
        queued.append(copier.copy_event())
        if len(queued) > in_flight:
            event = queued.popleft()
            copier.host_waits(event)
            times.append(copier.time_of(event))
            if time.perf_counter() - begun >= SECONDS:
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

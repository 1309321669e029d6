"""What the machine can do at best, measured in the run's own process with the run's own buffers: the limit beside the result."""

from __future__ import annotations

import itertools
import time
from collections import deque

from planner.units import GB
from runtime.engine import Engine
from runtime.load import Arrival

SECONDS = 1.5
"""Least time of one measurement."""


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
    """Chunk after chunk of the arena into a ring slot, the plan's chunk size and copies in flight, by device time."""
    copier, (chunk, in_flight) = engine.copier, engine.chunking
    dst = engine.ring.largest_slot
    size = min(chunk, dst.numel())
    spans: deque = deque()
    begun, copied = time.perf_counter(), 0
    first = copier.copy_event()
    for start in itertools.cycle(range(0, engine.arena.nbytes - size + 1, size)):
        copier.copy(dst[:size], engine.arena.slice(start, size))
        spans.append(copier.copy_event())
        copied += size
        if len(spans) > in_flight:
            copier.host_waits(spans.popleft())
            if time.perf_counter() - begun >= SECONDS:
                break
    last = copier.copy_event()
    copier.host_waits(last)
    return copied / (copier.time_of(last) - copier.time_of(first)) / GB

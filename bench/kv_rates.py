"""What the tiers of pages give without an engine in between."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from queue import SimpleQueue
from statistics import median

import torch

from bench.kv_rig import Rig
from planner.units import GB
from runtime.kv.segments import SegmentFiles


def link_gbps(rig: Rig, nbytes: int) -> float:
    """Whole pages from the arena, one after the other: over the link, or, without a card, to memory that is there already."""
    memory, size = rig.engine.page_memory, rig.shape.payload_bytes
    pages = list(islice(cycle(memory.tensor.split(size)), nbytes // size))
    if memory.device is None:
        targets = torch.zeros(min(4, len(pages)), size, dtype=torch.uint8)
        return _median_gbps(nbytes, lambda: [targets[i % len(targets)].copy_(page) for i, page in enumerate(pages)])
    lane, device = memory.device.lane(), memory.device

    def copy() -> None:
        lane.copy((memory.bounce[i % len(memory.bounce)], page) for i, page in enumerate(pages))
        device.host_waits(lane.event())

    return _median_gbps(nbytes, copy)


def card_gbps(rig: Rig, nbytes: int) -> float:
    """Whole pages within VRAM."""
    memory, size = rig.engine.page_memory, rig.shape.payload_bytes

    def copy() -> None:
        for i in range(nbytes // size):
            memory.bounce[i % len(memory.bounce)].copy_(memory.kept[i])
        memory.device.host_waits(memory.device.compute_event())

    return _median_gbps(nbytes, copy)


def disk_gbps(rig: Rig, nbytes: int) -> float:
    """Pages of the directory into the arena by as many threads as restoring uses, without a look at them."""
    files, size, record = SegmentFiles(rig.disk.directory), rig.shape.payload_bytes, rig.shape.record_bytes
    found = sorted(files.found().items())
    places = [(number, slot * record) for number, stat in found for slot in range(stat.st_size // record)]
    memory = rig.engine.page_memory
    slots: SimpleQueue[memoryview] = SimpleQueue()
    for i in range(min(2 * rig.readers, len(memory.view) // size)):
        slots.put(memory.view[i * size : (i + 1) * size])

    def read(place: tuple[int, int]) -> None:
        view = slots.get()
        files.read(place[0], [view], place[1] + record - size)
        slots.put(view)

    with ThreadPoolExecutor(rig.readers) as pool:
        return _median_gbps(nbytes, lambda: list(pool.map(read, islice(cycle(places), nbytes // size))))


RATES: dict[str, Callable[[Rig, int], float]] = {"vram": card_gbps, "dram": link_gbps, "ssd": disk_gbps}
"""Tier -> the rate at which it gives pages, GB/s."""


def _median_gbps(nbytes: int, act: Callable[[], object], times: int = 3) -> float:
    """After one that warms up."""
    rates = []
    for _ in range(times + 1):
        begun = time.perf_counter()
        act()
        rates.append(nbytes / GB / (time.perf_counter() - begun))
    return median(rates[1:])

"""What the tiers of pages give without an engine in between, and how fast the host launches."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from queue import SimpleQueue

import torch

from bench.kv_rig import Rig
from penstock.planner.common.measures import GB
from penstock.planner.probe.layer_launch import TinyDecoder
from penstock.runtime.kv.disk.segments import SegmentFiles


def link_gbps(rig: Rig, nbytes: int) -> float:
    """Whole pages from the arena, one after the other: over the link, or, without a card, to memory that is there already."""
    memory, size = rig.engine.page_memory, rig.shape.payload_bytes
    pages = list(islice(cycle(memory.tensor.split(size)), nbytes // size))
    if memory.device is None:
        targets = torch.zeros(min(4, len(pages)), size, dtype=torch.uint8)
        return _gbps(nbytes, lambda: [targets[i % len(targets)].copy_(page) for i, page in enumerate(pages)])
    lane, device = memory.device.lane(), memory.device

    def copy() -> None:
        lane.copy((memory.bounce[i % len(memory.bounce)], page) for i, page in enumerate(pages))
        device.host_waits(lane.event())

    return _gbps(nbytes, copy)


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
        return _gbps(nbytes, lambda: list(pool.map(read, islice(cycle(places), nbytes // size))))


LAUNCHES = 8
"""Steps of ``LaunchRate`` beside a sample."""
RATES: dict[str, Callable[[Rig, int], float]] = {"dram": link_gbps, "ssd": disk_gbps}
"""Tier -> the rate at which it gives pages, GB/s; VRAM's are shared, not given."""


class LaunchRate:
    """The probe's measurement of ``layer_launch_s``, a few steps at a time."""

    def __init__(self, rig: Rig):
        self._layers = TinyDecoder(str(rig.device))
        self._synchronize = (lambda: torch.cuda.synchronize(rig.device)) if rig.device.type == "cuda" else (lambda: None)

    def samples(self, steps: int) -> list[float]:
        """Seconds a layer of each; one more warms up."""
        return [self._layers.timed_step(self._synchronize) for _ in range(steps + 1)][1:]


def _gbps(nbytes: int, act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return nbytes / GB / (time.perf_counter() - begun)

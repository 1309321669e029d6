"""The ring's real threads beside a device that is late: every byte in time, and an end that waits for what is queued."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch

from penstock.planner.common.errors import UserError
from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.memory.pieces import Segment
from penstock.runtime.moving.ring import VramRing
from tests.cli import HANGS_S
from tests.runtime.fakes import Setting, contents


class ThreadedDevice:
    """Streams with a thread of their own, which dawdle: the ring's real threads against a device that is late at random."""

    def __init__(self, seed: int):
        self._random = random.Random(seed)
        self._streams = {name: ThreadPoolExecutor(1) for name in ("copies", "compute")}
        self.broken: BaseException | None = None

    def launch(self, kernel: Callable[[], None], stream: str = "compute") -> None:
        pause = self._random.choice([0, 0, 1e-4, 5e-4])

        def work() -> None:
            time.sleep(pause)
            try:
                kernel()
            except BaseException as error:
                self.broken = error

        self._streams[stream].submit(work)

    def copying(self) -> AbstractContextManager[None]:
        return nullcontext()

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.launch(lambda: dst.copy_(src), "copies")

    def _event(self, stream: str) -> tuple[threading.Event, list[float]]:
        happened, at = threading.Event(), []
        self._streams[stream].submit(lambda: (at.append(time.perf_counter()), happened.set()))
        return happened, at

    def copy_event(self) -> tuple[threading.Event, list[float]]:
        return self._event("copies")

    def compute_event(self) -> tuple[threading.Event, list[float]]:
        return self._event("compute")

    def copy_waits(self, event: tuple[threading.Event, list[float]]) -> None:
        self._streams["copies"].submit(event[0].wait)

    def compute_waits(self, event: tuple[threading.Event, list[float]]) -> None:
        self._streams["compute"].submit(event[0].wait)

    def host_waits(self, event: tuple[threading.Event, list[float]]) -> None:
        event[0].wait()

    def done(self, event: tuple[threading.Event, list[float]]) -> bool:
        return event[0].is_set()

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        return host

    def time_of(self, event: tuple[threading.Event, list[float]]) -> float:
        return event[1][0]

    def close(self) -> None:
        for stream in self._streams.values():
            stream.shutdown()


class OneBufferEach:
    """DRAM with one buffer a unit, rewritten for the next pass as soon as it was given back; a unit not given back cannot be had."""

    def __init__(self, units: list[Unit], nbytes: int):
        self._units = units
        self._buffers = {unit: contents(i, nbytes).clone() for i, unit in enumerate(units)}
        self._free = {unit: threading.Semaphore(1) for unit in units}
        self._passes = dict.fromkeys(units, 0)

    def arrived(self, unit: Unit) -> bool:
        return self._free[unit]._value > 0

    def acquire(self, unit: Unit) -> tuple[int, torch.Tensor]:
        assert self._free[unit].acquire(timeout=HANGS_S), f"{unit} was never given back"
        return 0, self._buffers[unit]

    def release(self, unit: Unit) -> None:
        self._passes[unit] += 1
        number = self._passes[unit] * len(self._units) + self._units.index(unit)
        self._buffers[unit].copy_(contents(number, len(self._buffers[unit])))
        self._free[unit].release()


def threaded(setting: Setting, device: ThreadedDevice) -> tuple[list[Unit], VramRing]:
    return setting.units, setting.ring(device, OneBufferEach(setting.units, 64), (Segment(0, 0, 64),), 64)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("wrap", [True, False])
def test_real_threads_on_a_late_device_bring_every_byte_in_time(seed: int, wrap: bool) -> None:
    before = set(threading.enumerate())
    device = ThreadedDevice(seed)
    setting = Setting("afaff", (1 + seed % 2, 2), seed, 1 + seed % 3, 24, wrap, balance=1 + seed % 3, keep=seed % 2)
    units, ring = threaded(setting, device)
    used = []

    def use(buffer: torch.Tensor, number: int) -> None:
        assert torch.equal(buffer, contents(number, 64)), f"unit number {number} holds other bytes"
        used.append(number)

    try:
        ring.start()
        for k in range(20):
            ring.begin_pass()
            for i, unit in enumerate(units):
                _, buffer = ring.enter(unit)
                device.launch(partial(use, buffer, k * len(units) + i))
                ring.leave(unit, device.compute_event())
    finally:
        ring.close()
        device.close()
    assert device.broken is None and used == list(range(20 * len(units)))
    assert set(threading.enumerate()) <= before


def test_closing_waits_for_the_copies_that_were_queued() -> None:
    """Their DRAM is unregistered and their slots are used for something else right after."""
    device = ThreadedDevice(0)
    units, ring = threaded(Setting("af", (1, 1), 2, 8, 1), device)
    late = threading.Event()
    device.launch(late.wait, "copies")
    ring.start()
    while ring.turns.copied < 1 and len(ring._queued) < 8:
        time.sleep(0.001)
    closing = threading.Thread(target=ring.close)
    closing.start()
    time.sleep(0.05)
    assert closing.is_alive(), "closed while a copy was on its way"
    late.set()
    closing.join(30)
    device.close()
    assert not closing.is_alive() and not ring._queued


def test_closing_waits_for_the_copy_that_is_just_being_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    device = ThreadedDevice(0)
    _, ring = threaded(Setting("af", (1, 1), 1, 1, 64), device)
    real, begun = device.copy, threading.Event()

    def slow(dst: torch.Tensor, src: torch.Tensor) -> None:
        begun.set()
        time.sleep(0.1)
        real(dst, src)

    monkeypatch.setattr(device, "copy", slow)
    ring.start()
    begun.wait()
    ring.close()
    device.close()
    assert ring.stats.bytes == 64 and not ring._queued


@pytest.mark.parametrize("where", ["acquire", "release", "copy", "host_waits"])
def test_what_breaks_on_the_rings_threads_is_raised_where_compute_waits(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device = ThreadedDevice(0)
    units, ring = threaded(Setting("af", (1, 1), 1, 1, 64), device)

    def fail(*_: object) -> None:
        raise OSError("the drive is gone")

    monkeypatch.setattr(ring._source if where in ("acquire", "release") else device, where, fail)
    ring.start()
    try:
        with pytest.raises(OSError, match="the drive is gone"):
            for _ in range(3):
                for unit in units:
                    ring.enter(unit)
                    ring.leave(unit, device.compute_event())
    finally:
        ring.close()
        device.close()
    assert not any(thread.is_alive() for thread in ring._threads)


def test_compute_that_waits_is_told_when_the_stream_is_stopped() -> None:
    device = ThreadedDevice(0)
    units, ring = threaded(Setting("af", (1, 1), 1, 1, 64, wrap=False), device)
    ring.start()
    threading.Timer(0.05, ring.close).start()
    with pytest.raises(UserError, match="stopped"):
        ring.enter(units[0])
    device.close()

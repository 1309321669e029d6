"""No slot in use is overwritten and no unit is used before it arrived, in whatever order device, copier and compute come to run."""

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
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from planner.errors import UserError
from planner.placement import Unit
from planner.policy.turns import Turns
from runtime.pieces import Segment
from runtime.ring import VramRing
from tests.runtime.fakes import Rig, Setting, contents


@st.composite
def settings_of_rings(draw: st.DrawFn) -> Setting:
    kinds = draw(st.text("af", min_size=1, max_size=5))
    slots = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    return Setting(
        kinds=kinds,
        slots=slots,
        distance=draw(st.integers(0, 6)),
        in_flight=draw(st.integers(1, 3)),
        chunk=draw(st.sampled_from([1, 4, 11])),
        wrap=draw(st.booleans()),
        balance=draw(st.integers(1, 5)),
        keep=draw(st.integers(0, Turns(kinds, dict(zip("af", slots, strict=True)), 1).shortest_round - 1)),
        late=draw(st.booleans()),
    )


class AnyOrder(RuleBasedStateMachine):
    """Hypothesis plays the scheduler: at every point any actor that can go on may be the next one."""

    @initialize(setting=settings_of_rings(), seed=st.integers(0, 1 << 16))
    def make(self, setting: Setting, seed: int) -> None:
        self.rig = Rig(setting, passes=3, choose=random.Random(seed).choice)

    @rule(pick=st.integers(0, 59), times=st.integers(1, 8))
    def go_on(self, pick: int, times: int) -> None:
        enabled = self.rig.enabled()
        for _ in range(times if enabled else 0):
            actor = enabled[pick % len(enabled)]
            if actor in self.rig.enabled():
                self.rig.step(actor)

    def teardown(self) -> None:
        """Whatever came before, a fair scheduler brings compute to its end: nobody waits for ever."""
        if hasattr(self, "rig"):
            run_to_the_end(self.rig, random.Random(0).choice)


AnyOrder.TestCase.settings = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate]
)
TestAnyOrder = AnyOrder.TestCase


def run_to_the_end(rig: Rig, choose: Callable[[list[str]], str]) -> None:
    while not rig.over:
        enabled = rig.enabled()
        assert enabled, f"nothing can go on at {rig.state()}"
        rig.step(choose(enabled))
    assert rig.used == list(range(len(rig.used)))


SMALL = {
    "one slot of each class": Setting("af"),
    "a window of two": Setting("af", distance=2, in_flight=2, chunk=11),
    "one class, one slot": Setting("ff", slots=(1, 1), distance=2, in_flight=2, chunk=6),
    "one class, two slots": Setting("ff", slots=(1, 2), distance=2, in_flight=1, chunk=6),
    "no wrap-around": Setting("af", distance=2, in_flight=2, chunk=11, wrap=False),
    "nothing ahead": Setting("af", distance=0, in_flight=2, chunk=11),
    "a unit kept": Setting("af", distance=2, chunk=11, keep=1),
    "two to choose from": Setting("ffa", distance=3, chunk=11, balance=2),
    "two to choose from, the SSD late": Setting("ffa", distance=3, chunk=11, balance=2, late=True),
    "a unit kept and two to choose from": Setting("af", slots=(1, 2), distance=3, chunk=11, balance=2, keep=1),
}


@pytest.mark.parametrize("case", SMALL)
def test_every_interleaving_of_two_passes_keeps_the_rules(case: str) -> None:
    """All states that any order can reach, each entered by every step that leads to it."""
    seen: set[tuple[int, ...]] = set()
    paths: list[tuple[str, ...]] = [()]
    ends = 0
    while paths:
        path = paths.pop()
        rig = Rig(SMALL[case], passes=2, only_when_done=True)
        for actor in path:
            rig.step(actor)
        while rig.state() not in seen:
            seen.add(rig.state())
            enabled = rig.enabled()
            ends += rig.over
            assert enabled or rig.over, f"nothing can go on after {path}"
            if not enabled:
                break
            paths += [(*path, actor) for actor in enabled[1:]]
            path = (*path, enabled[0])
            rig.step(enabled[0])
    assert ends and len(seen) > 300


@pytest.mark.parametrize("broken", ["copies do not wait for compute", "compute does not wait for copies", "DRAM is given back when queued"])
def test_the_rig_finds_a_ring_that_breaks_a_rule(broken: str) -> None:
    rig = Rig(Setting("af", slots=(1, 1), distance=2, in_flight=4), passes=3)
    rig.device.time_of = lambda event: 0.0
    if broken.startswith("copies"):
        rig.device.copy_waits = lambda event: None
    elif broken.startswith("compute"):
        rig.device.compute_waits = lambda event: None
    else:
        rig.device.host_waits = lambda event: None
    order = random.Random(0)
    with pytest.raises(AssertionError, match="used before its bytes arrived"):
        run_to_the_end(rig, order.choice)


@pytest.mark.parametrize("kinds", ["a", "af", "aff", "fffa", "afafaf"])
@pytest.mark.parametrize("slots", [(1, 1), (2, 3)])
def test_the_arithmetic_of_slots_is_that_of_taking_turns(kinds: str, slots: tuple[int, int]) -> None:
    counts = dict(zip("af", slots, strict=True))
    turns = Turns(kinds, counts, 1, True)
    holders: dict[tuple[str, int], int] = {}
    taken = dict.fromkeys("af", 0)
    for number in range(4 * len(kinds)):
        name = kinds[number % len(kinds)]
        place = (name, taken[name] % counts[name])
        taken[name] += 1
        assert turns.place(number) == place
        assert turns.before(number) == holders.get(place)
        holders[place] = number


def test_compute_waits_on_the_host_only_for_a_copy_that_is_not_yet_queued() -> None:
    rig = Rig(Setting("af", slots=(2, 2), distance=2, in_flight=9), passes=1)
    while "copier" in rig.enabled():
        rig.step("copier")
    for _ in range(4):
        rig.step("host")
    assert rig.ring.turns.entered == 2 and not any(rig.device.done_on.values()), "the device has not yet begun"
    assert rig.ring.stats.waits == 0


def test_a_unit_out_of_order_is_refused() -> None:
    rig = Rig(Setting("af"), passes=1)
    with pytest.raises(RuntimeError, match=r"ffn\.1 entered out of order; expected attn\.0"):
        rig.ring.enter(rig.units[1])
    with pytest.raises(RuntimeError, match="left without being entered"):
        rig.ring.leave(rig.units[0], rig.device.compute_event())


def test_with_nothing_ahead_a_unit_is_copied_when_it_is_asked_for() -> None:
    rig = Rig(Setting("af", slots=(2, 2), distance=0), passes=1)
    rig.step("host")
    assert "copier" not in rig.enabled()
    rig.step("host")
    while "copier" in rig.enabled():
        rig.step("copier")
    assert rig.copied == [0]


def before_compute_begins(setting: Setting) -> Rig:
    """All that the copier can do by then."""
    rig = Rig(setting, passes=1)
    while enabled := [actor for actor in rig.enabled() if actor != "host"]:
        rig.step(enabled[0])
    return rig


@pytest.mark.parametrize(("balance", "copied"), [(1, [0]), (2, [0, 2]), (3, [0, 2, 3])])
def test_a_balance_says_how_far_one_kind_may_be_copied_before_its_turn(balance: int, copied: list[int]) -> None:
    """Two FFN units share a slot, so the second waits for compute; the attention units behind it need not."""
    rig = before_compute_begins(Setting("ffaa", slots=(2, 1), distance=4, balance=balance))
    assert rig.copied == copied
    assert rig.ring.stats.out_of_turn == len(copied) - 1


def test_what_is_still_on_the_ssd_is_not_waited_for_while_a_unit_waits_for_its_slot() -> None:
    rig = before_compute_begins(Setting("ffaa", slots=(2, 1), distance=4, balance=4, late=True))
    assert (rig.copied, rig.source.acquired) == ([0], 2)


@pytest.mark.parametrize("keep", [0, 1, 2, 3])
def test_a_kept_unit_holds_its_slot_while_later_ones_are_left(keep: int) -> None:
    """Of four slots the first is given to the fifth unit."""
    rig = Rig(Setting("af", slots=(2, 2), distance=4, keep=keep), passes=3)
    while 4 not in rig.copied:
        rig.step(next((actor for actor in rig.enabled() if actor != "host"), "host"))
    assert rig.ring.turns.left == 1 + keep


@pytest.mark.parametrize(("keep", "waits"), [(0, False), (1, False), (2, True)])
def test_the_usual_margin_of_two_slots_has_room_for_one_kept_unit(keep: int, waits: bool) -> None:
    rig = Rig(Setting("af", slots=(2, 2), distance=2, keep=keep), passes=4)
    run_to_the_end(rig, lambda enabled: next((actor for actor in enabled if actor != "host"), "host"))
    assert (rig.ring.stats.slot_waits > 0) == waits


@pytest.mark.parametrize("kinds", ["af", "aff", "fffa", "f"])
@pytest.mark.parametrize("slots", [(1, 1), (2, 3)])
def test_one_unit_more_than_may_be_kept_stands_still(kinds: str, slots: tuple[int, int]) -> None:
    most = Turns(kinds, dict(zip("af", slots, strict=True)), 1).shortest_round - 1
    run_to_the_end(Rig(Setting(kinds, slots, distance=6, keep=most), passes=3 + most), random.Random(0).choice)
    with pytest.raises(AssertionError, match="nothing can go on"):
        run_to_the_end(Rig(Setting(kinds, slots, distance=6, keep=most + 1), passes=3 + most), random.Random(0).choice)


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

    def copy_event(self, again: object = None) -> tuple[threading.Event, list[float]]:
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
        self._buffers = {unit: contents(i, nbytes) for i, unit in enumerate(units)}
        self._free = {unit: threading.Semaphore(1) for unit in units}
        self._passes = dict.fromkeys(units, 0)

    def arrived(self, unit: Unit) -> bool:
        return self._free[unit]._value > 0

    def acquire(self, unit: Unit) -> tuple[int, torch.Tensor]:
        assert self._free[unit].acquire(timeout=30), f"{unit} was never given back"
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

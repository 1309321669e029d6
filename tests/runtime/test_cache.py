"""The DRAM cache holds what its policy says in the slots that it has, whatever order reads complete in."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planner.common.errors import UserError
from penstock.planner.contract.policy import Evict, LayerPolicy, Load, PinnedPolicy, RollingPolicy, Step
from penstock.runtime.moving.dram_cache import LayerCache, LayerReader

Done = Callable[[BaseException | None], None]


@dataclass
class Slots:
    """What lies in each slot, as a disk and a consumer see it. Any misuse is an error that the test sees."""

    wanted: dict[int, int] = field(default_factory=dict)
    """Slot -> layer being read."""
    holds: dict[int, int] = field(default_factory=dict)
    """Slot -> layer that lies there."""
    in_use: dict[int, int] = field(default_factory=dict)
    """Slot -> layer that the consumer reads."""
    most: int = 0

    def begin(self, layer: int, slot: int) -> None:
        assert slot not in self.wanted, f"slot {slot} is already being read into"
        assert slot not in self.in_use, f"layer {layer} is read over layer {self.in_use[slot]}, which is in use"
        self.holds.pop(slot, None)
        self.wanted[slot] = layer
        self.most = max(self.most, len(self.wanted) + len(self.holds))

    def finish(self, slot: int) -> None:
        self.holds[slot] = self.wanted.pop(slot)

    def use(self, layer: int, slot: int) -> None:
        assert self.holds.get(slot) == layer, f"slot {slot} was given out for layer {layer} and holds {self.holds.get(slot)}"
        self.in_use[slot] = layer

    def leave(self, layer: int, slot: int) -> None:
        assert self.holds.get(slot) == layer, f"slot {slot} changed under layer {layer}"
        del self.in_use[slot]


class Disk:
    """A reader whose reads complete on another thread, in an order that the test draws."""

    def __init__(self, pick: Callable[[int], int] = lambda waiting: 0):
        self.slots = Slots()
        self.errors: list[BaseException] = []
        self.reads: list[int] = []
        self._pick = pick
        self._open: list[tuple[int, int, Done]] = []
        self._change = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._complete, name="disk", daemon=True)
        self._thread.start()

    def read(self, layer: int, slot: int, done: Done) -> None:
        with self._change:
            self._note(self.slots.begin, layer, slot)
            self.reads.append(layer)
            self._open.append((layer, slot, done))
            self._change.notify_all()

    def note(self, act: Callable[..., None], *args: int) -> None:
        with self._change:
            self._note(act, *args)

    def close(self) -> None:
        """Complete what is open, and end."""
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join(30)

    def _note(self, act: Callable[..., None], *args: int) -> None:
        try:
            act(*args)
        except AssertionError as error:
            self.errors.append(error)

    def _complete(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._open or self._closed)
                if not self._open:
                    return
                _, slot, done = self._open.pop(self._pick(len(self._open)) % len(self._open))
                self._note(self.slots.finish, slot)
            done(self.errors[0] if self.errors else None)


@contextmanager
def no_deadlock(cache: LayerCache) -> Iterator[None]:
    """Who still waits inside after 20 seconds is woken by an error."""
    alarm = threading.Timer(20, cache.close)
    alarm.daemon = True
    alarm.start()
    try:
        yield
    finally:
        alarm.cancel()


def pass_over(cache: LayerCache, disk: Disk, layers: range, overlap: bool) -> None:
    """One forward pass. With ``overlap`` layers are left on another thread, while the next is asked for, as with a GPU's copies."""

    def leave(layer: int, slot: int) -> None:
        disk.note(disk.slots.leave, layer, slot)
        cache.release(layer)

    with ThreadPoolExecutor(1) as other:
        left = []
        for layer in layers:
            slot = cache.acquire(layer)
            disk.note(disk.slots.use, layer, slot)
            if overlap:
                left.append(other.submit(leave, layer, slot))
            else:
                leave(layer, slot)
        for future in left:
            future.result(30)


@st.composite
def policies(draw: st.DrawFn) -> tuple[Callable[[], LayerPolicy], int, int]:
    """A policy that the plan's rules allow, its slots and how many layers it cycles over."""
    layers = draw(st.integers(2, 9))
    cap = draw(st.integers(0, layers))
    hwm = cap + draw(st.integers(3, 5))
    distance = draw(st.integers(cap, hwm))
    wrap = draw(st.booleans())
    slots = min(hwm, layers)
    order = tuple(range(layers))
    if draw(st.booleans()):
        resident = frozenset(draw(st.permutations(order))[:cap])
        return lambda: PinnedPolicy(order, resident, slots, distance, wrap), slots, layers
    return lambda: RollingPolicy(order, min(cap, slots), slots, distance, wrap), slots, layers


@settings(max_examples=400, deadline=None)
@given(policies(), st.lists(st.integers(0, 20), min_size=1, max_size=60), st.booleans(), st.booleans())
def test_slots_hold_what_they_should_whatever_order_reads_complete_in(
    made: tuple[Callable[[], LayerPolicy], int, int], picks: list[int], overlap: bool, wait: bool
) -> None:
    policy, slots, layers = made
    turn = iter(range(1 << 30))
    with closing(Disk(lambda waiting: picks[next(turn) % len(picks)])) as disk:
        cache = LayerCache(policy(), slots, disk.read, keep_log=True)
        with no_deadlock(cache):
            cache.preload(wait)
            for _ in range(3):
                pass_over(cache, disk, range(layers), overlap)
        cache.close()
    assert disk.errors == []
    assert disk.slots.most <= slots and cache.stats.peak_layers <= slots
    assert cache.stats.accesses == 3 * layers == cache.stats.hits + cache.stats.misses
    assert cache.stats.log == [(kind, layer) for kind, layer in acted_out(policy(), layers)], "not what the policy alone says"
    loads = [layer for kind, layer in cache.stats.log if kind == "load"]
    assert cache.stats.loads == len(loads) and disk.reads == loads[: len(disk.reads)]
    assert cache.stats.evictions_out_of_window + cache.stats.evictions_in_window == len(cache.stats.log) - len(loads)


def acted_out(policy: LayerPolicy, layers: int) -> list[tuple[str, int]]:
    """Loads and evictions of the policy by itself, as a simulation sees them."""
    log = [("load", layer) for layer in policy.preload()]
    for _ in range(3):
        for layer in range(layers):
            log += [("load" if isinstance(a, Load) else "evict", a.layer) for a in policy.access(layer).actions]
    return log


@dataclass
class Script:
    """A policy that says what the test wrote down."""

    hwm: int
    first: tuple[int, ...]
    steps: dict[int, Step]

    @property
    def held(self) -> tuple[int, ...]:
        return ()

    def preload(self) -> tuple[int, ...]:
        return self.first

    def access(self, layer: int) -> Step:
        return self.steps.get(layer, Step(True, ()))


def at_once(layer: int, slot: int, done: Done) -> None:
    done(None)


def test_the_verbose_lines_say_what_happened() -> None:
    said: list[str] = []
    script = Script(
        3,
        (0, 1, 2),
        {
            1: Step(True, (Evict(0, in_window=False), Load(3, prefetch=True)), shrink=True),
            5: Step(False, (Evict(2, in_window=True), Load(5, prefetch=False))),
        },
    )
    cache = LayerCache(script, 3, at_once, said.append)
    cache.preload(True)
    for layer in (0, 1, 5):
        cache.acquire(layer)
        cache.release(layer)
    assert said == [
        "loaded layer 0 to DRAM cache",
        "loaded layer 1 to DRAM cache",
        "loaded layer 2 to DRAM cache",
        "DRAM cache shrink: current=1, count=3",
        "evict (out of window): layer 0",
        "loaded layer 3 to DRAM cache",
        "layer 5: timeout, loading immediately",
        "evict (in window, LRU): layer 2",
        "loaded layer 5 to DRAM cache",
    ]
    stats = cache.stats
    assert (stats.hits, stats.misses, stats.loads, stats.shrinks) == (2, 1, 5, 1)
    assert (stats.evictions_out_of_window, stats.evictions_in_window, stats.peak_layers) == (1, 1, 3)


def test_a_window_wider_than_the_cache_shows_as_evictions_inside_it() -> None:
    """The rules forbid such a plan; the log shows the damage that WSM's documents name where one is forced past them."""
    said: list[str] = []
    cache = LayerCache(RollingPolicy(tuple(range(8)), 3, 4, 6), 4, at_once, said.append)
    cache.preload(True)
    for layer in [*range(8)] * 2:
        cache.acquire(layer)
        cache.release(layer)
    assert cache.stats.evictions_in_window > 0 and any("in window, LRU" in line for line in said)
    assert cache.stats.peak_layers <= 4


def test_a_rolling_window_shrinks_and_never_misses() -> None:
    said: list[str] = []
    cache = LayerCache(RollingPolicy(tuple(range(12)), 4, 7, 5), 7, at_once, said.append)
    cache.preload(True)
    for layer in [*range(12)] * 2:
        cache.acquire(layer)
        cache.release(layer)
    assert cache.stats.shrinks > 0 and any(line.startswith("DRAM cache shrink: current=") for line in said)
    assert (cache.stats.misses, cache.stats.evictions_in_window) == (0, 0)


@pytest.mark.parametrize(("layers", "arrive"), [(0, 0), (1, 1), (3, 3), (None, 4)])
def test_compute_may_begin_once_so_many_layers_of_the_first_fill_have_arrived(layers: int | None, arrive: int) -> None:
    calls: list[Done] = []
    cache = LayerCache(PinnedPolicy(tuple(range(8)), frozenset({2, 6}), 4, 3), 4, lambda layer, slot, done: calls.append(done))
    cache.preload(False)
    seen: list[tuple[int, int]] = []
    for done in calls[:arrive]:
        done(None)
    cache.wait_preloaded(lambda arrived, wanted: seen.append((arrived, wanted)), layers)
    assert seen == [(arrive, arrive)] and cache.stats.warm_layers == arrive


def test_layers_beyond_those_that_are_awaited_do_not_count() -> None:
    """The first ones that compute visits are awaited, whichever arrive first."""
    calls: dict[int, Done] = {}
    cache = LayerCache(PinnedPolicy(tuple(range(8)), frozenset({2, 6}), 4, 3), 4, lambda layer, slot, done: calls.update({layer: done}))
    cache.preload(False)
    assert list(calls) == [0, 1, 2, 6]
    calls[6](None)
    over = waiting(lambda: cache.wait_preloaded(layers=1))
    calls[0](None)
    assert over() is None and cache.stats.warm_layers == 2


def failing(layer: int, slot: int, done: Done) -> None:
    done(OSError("the disk is gone") if layer == 2 else None)


@pytest.mark.parametrize("wait", [True, False])
def test_the_error_of_a_read_comes_out_where_the_layer_is_wanted(wait: bool) -> None:
    cache = LayerCache(PinnedPolicy(tuple(range(4)), frozenset(), 3, 3), 3, failing)
    if wait:
        with pytest.raises(OSError, match="the disk is gone"):
            cache.preload(True)
        return
    cache.preload(False)
    with pytest.raises(OSError, match="the disk is gone"):
        for layer in range(4):
            cache.acquire(layer)
            cache.release(layer)


def test_the_error_of_a_read_wakes_who_already_waits() -> None:
    calls: list[Done] = []
    cache = LayerCache(PinnedPolicy((0, 1, 2, 3), frozenset(), 3, 3), 3, lambda layer, slot, done: calls.append(done))
    cache.preload(False)
    outcome = waiting(lambda: cache.acquire(0))
    calls[1](OSError("the disk is gone"))
    assert isinstance(outcome(), OSError)


@pytest.mark.parametrize("act", ["acquire", "preload"])
def test_closing_wakes_who_waits(act: str) -> None:
    never: LayerReader = lambda layer, slot, done: None  # noqa: E731
    cache = LayerCache(PinnedPolicy((0, 1, 2, 3), frozenset(), 3, 3), 3, never)
    if act == "acquire":
        cache.preload(False)
    outcome = waiting((lambda: cache.acquire(0)) if act == "acquire" else (lambda: cache.preload(True)))
    cache.close()
    assert isinstance(outcome(), UserError)
    with pytest.raises(UserError, match="stopped"):
        cache.acquire(0)


def test_a_layer_on_its_way_that_is_evicted_gives_its_slot_back_once_it_has_arrived() -> None:
    calls: dict[int, Done] = {}
    reads: list[tuple[int, int]] = []

    def read(layer: int, slot: int, done: Done) -> None:
        calls[layer] = done
        reads.append((layer, slot))

    script = Script(2, (0, 1), {0: Step(True, (Evict(1, in_window=False), Load(2, prefetch=True)))})
    cache = LayerCache(script, 2, read)
    cache.preload(False)
    calls[0](None)
    cache.acquire(0)
    assert [layer for layer, _ in reads] == [0, 1], "layer 2 has no slot while layer 1 is still being read into it"
    calls[1](None)
    assert reads[2] == (2, reads[1][1])


def test_a_load_that_never_started_is_forgotten_when_it_is_evicted() -> None:
    reads: list[int] = []
    script = Script(1, (0, 1), {0: Step(True, (Evict(1, in_window=False),))})
    cache = LayerCache(script, 1, lambda layer, slot, done: (reads.append(layer), done(None)))
    cache.preload(False)
    cache.acquire(0)
    cache.release(0)
    assert reads == [0]


def waiting(act: Callable[[], object]) -> Callable[[], BaseException | None]:
    """Do ``act`` on a thread of its own, which is blocked in it on return; the answer waits for what it raised."""
    raised: list[BaseException] = []
    started = threading.Event()

    def body() -> None:
        started.set()
        try:
            act()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    started.wait(30)
    thread.join(0.05)

    def answer() -> BaseException | None:
        thread.join(30)
        assert not thread.is_alive(), "still waiting"
        return raised[0] if raised else None

    return answer

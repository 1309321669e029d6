"""The ring and recorded passes use the same slots in turn: each finds the units that it computes with, whoever brought them."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from penstock.planner.contract.decided.placement import Unit
from penstock.planner.simulate.lanes.feed import RecordedFeed
from penstock.planner.simulate.lanes.lanes import Lanes, Work
from penstock.runtime.memory.pieces import Segment
from penstock.runtime.moving.dram_side import DramTier
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.moving.ring import VramRing
from penstock.runtime.recorded.recorded_stream import RecordedStream, Streamed
from penstock.runtime.recorded.slot_turns import SlotTurns
from tests.support import HostCopier

NBYTES = 8


class PlayedGraph:
    """A recorder whose launches are passes over the recorded stream: what it is told happens at once."""

    begin = results = 0.0
    copies = 0

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.copies += 1
        dst.copy_(src)

    def copy_event(self) -> float:
        return time.perf_counter()

    def copy_waits(self, event: float) -> None: ...
    def at_launch(self, act: Callable[[], None]) -> None:
        act()

    def compute_event(self) -> float:
        return time.perf_counter()

    def compute_waits(self, event: float) -> None: ...
    def time_of(self, event: float) -> float:
        return event

    def wait(self) -> None: ...
    def wait_results(self) -> None: ...
    def hold(self) -> None: ...
    def yield_copies(self) -> None: ...


class Still:
    """DRAM that holds every unit for good."""

    def __init__(self, units: list[Unit]):
        self.bytes = {u: torch.full((NBYTES,), i + 1, dtype=torch.uint8) for i, u in enumerate(units)}
        self.cache = SimpleNamespace(wait_preloaded=lambda: None)

    def arrived(self, unit: Unit) -> bool:
        return True

    def acquire(self, unit: Unit) -> tuple[int, torch.Tensor]:
        return 0, self.bytes[unit]

    def release(self, unit: Unit) -> None: ...


class Rig:
    def __init__(self, kinds: str, slots: tuple[int, int], distance: int, elsewhere: int = 0):
        """The first ``elsewhere`` units stream for the ring alone."""
        self.units = [Unit({"a": "attn", "f": "ffn"}[kind], i) for i, kind in enumerate(kinds)]
        self.dram, self.device, self.graph = Still(self.units), HostCopier(), PlayedGraph()
        buffers = {n: [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(k)] for n, k in zip(("attn", "ffn"), slots, strict=True)}
        piece = (Segment(0, 0, NBYTES),)
        self.ring = VramRing(self.units, lambda _: piece, buffers, self.dram, self.device, distance, 2, Ledger(), True, max(1, distance))
        self.ledger = Ledger()
        streamed = {u: Streamed(u, self.dram.bytes[u], piece, ()) for u in self.units}
        self.recorded = RecordedStream(list(streamed.values())[elsewhere:], buffers, self.graph, self.ledger)
        self.turns = SlotTurns(self.ring, self.recorded, streamed, self.graph, cast(DramTier, self.dram), self.device)
        self.recorded_passes = 0

    @contextmanager
    def started(self) -> Iterator[None]:
        self.ring.start()
        try:
            yield
        finally:
            self.ring.close()

    def launched_singly(self) -> None:
        self.turns.give()
        self.ring.begin_pass()
        for unit in self.units:
            _, buffer = self.ring.enter(unit)
            assert torch.equal(buffer, self.dram.bytes[unit])
            self.ring.leave(unit, self.device.compute_event())

    def launched_as_a_whole(self, ends: bool = False) -> None:
        self.turns.take()
        before, first = self.graph.copies, len(self.recorded.rounds.first)
        self.recorded.begin_launch(ends)
        self.recorded.begin_pass()
        for i, unit in enumerate(self.recorded.units):
            assert torch.equal(self.recorded.buffer(i), self.dram.bytes[unit])
            self.recorded.enter(unit)
            self.recorded.leave(unit)
        self.recorded.end_pass()
        self.recorded.launched()
        assert self.graph.copies - before == len(self.recorded.units) - ends * first
        if ends:
            self.turns.give()
        self.recorded.settle()
        self.recorded_passes += 1


@pytest.mark.parametrize("seed", range(40))
def test_passes_of_both_sorts_find_their_units(seed: int) -> None:
    choose = random.Random(seed)
    kinds = "".join(choose.choice("af") for _ in range(choose.randint(1, 9)))
    rig = Rig(kinds, (choose.randint(1, 4), choose.randint(1, 4)), choose.randint(0, 6), choose.choice([0, 0, 1, len(kinds)]))
    with rig.started():
        for _ in range(12):
            choose.choice([rig.launched_singly, rig.launched_as_a_whole, partial(rig.launched_as_a_whole, ends=True)])()
        rig.recorded.finish()
    copied = rig.ledger.totals().get("h2d")
    assert (copied.bytes if copied else 0) == rig.recorded_passes * rig.recorded.nbytes


@pytest.mark.parametrize("kinds", ["faffaf", "faffafaf", "ffaa"])
def test_nothing_passes_the_link_twice_where_launches_change(kinds: str) -> None:
    """However often passes of both sorts follow each other, each unit comes once a pass, but for what lies in slots at the end: also units
    that the ring would not have brought so far ahead, and those that it brought to another slot."""
    rig = Rig(kinds, (2, 2), 1)
    from_dram = {tensor.data_ptr() for tensor in rig.dram.bytes.values()}
    counted, passes = Counted(from_dram), 8
    rig.device.copy = counted.over(rig.device.copy)  # type: ignore[method-assign]
    rig.graph.copy = counted.over(rig.graph.copy)  # type: ignore[method-assign]
    with rig.started():
        for _ in range(passes):
            rig.launched_as_a_whole()
            rig.launched_singly()
        rig.recorded.finish()
    assert 2 * passes * len(kinds) <= counted.copies <= 2 * passes * len(kinds) + 4


class Counted:
    """Counts copies whose source is one of these addresses."""

    def __init__(self, sources: set[int]):
        self._sources, self.copies = sources, 0

    def over(self, copy: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable[[torch.Tensor, torch.Tensor], None]:
        def counted(dst: torch.Tensor, src: torch.Tensor) -> None:
            self.copies += src.data_ptr() in self._sources
            copy(dst, src)

        return counted


def test_without_streamed_units_there_is_nothing_to_take() -> None:
    rig = Rig("", (0, 0), 0)
    with rig.started():
        rig.launched_as_a_whole()
        rig.launched_singly()


class LoggedLanes:
    """Copies that arrive at once. Says which unit each brings, and the unit that was left last."""

    def __init__(self, log: list[tuple[str, str]]):
        self._log, self.left = log, ""

    def add(self, track: str, work: Work, length_ns: int) -> None:
        self._log.append((work.name, self.left))
        work.done()


class LoggedGraph(PlayedGraph):
    """Says which unit each copy brings, by its bytes, and the unit that was left where it begins."""

    def __init__(self, units: list[Unit], log: list[tuple[str, str]]):
        self._units, self._log, self.left = units, log, ""

    def compute_event(self) -> str:
        return self.left

    def copy_waits(self, event: str) -> None:
        self._behind = event

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._log.append((str(self._units[int(src[0]) - 1]), self._behind))
        dst.copy_(src)


@pytest.mark.parametrize("seed", range(40))
def test_a_simulated_step_copies_what_a_recorded_one_does_when_it_does(seed: int) -> None:
    """The same units come in the same order, each behind the same unit. Units that the CPU computes stand between those that stream, and
    take part in neither."""
    choose = random.Random(seed)
    kinds = [choose.choice("af") for _ in range(choose.randint(1, 12))]
    units = [Unit({"a": "attn", "f": "ffn"}[kind], i) for i, kind in enumerate(kinds)]
    on_cpu = {unit for unit in units if unit.kind == "ffn" and choose.random() < 0.4}
    slots = {"attn": choose.randint(1, 4), "ffn": choose.randint(1, 4)}
    streamed = [unit for unit in units if unit not in on_cpu]
    simulated: list[tuple[str, str]] = []
    recorded: list[tuple[str, str]] = []
    lanes = LoggedLanes(simulated)
    feed = RecordedFeed(streamed, slots, lambda unit: (1, NBYTES), cast(Lanes, lanes))
    feed.begin_pass()
    simulated.clear()  # what fills the slots at first is nobody's step
    dram, graph = Still(units), LoggedGraph(units, recorded)
    buffers = {n: [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(k)] for n, k in slots.items()}
    piece = (Segment(0, 0, NBYTES),)
    stream = RecordedStream([Streamed(u, dram.bytes[u], piece, ()) for u in streamed], buffers, graph, Ledger())
    stream.all_there()
    for _ in range(2):
        feed.begin_pass()
        stream.begin_launch()
        stream.begin_pass()
        for unit in units:
            assert feed.ready(unit)
            feed.enter(unit)
            stream.enter(unit)
            lanes.left = graph.left = str(unit)
            feed.leave(unit)
            stream.leave(unit)
        stream.end_pass()
    assert simulated == recorded
    assert len(recorded) == 2 * len(streamed)


class TimedGraph(PlayedGraph):
    """Points that are the seconds at which they happen: one after the other."""

    def __init__(self) -> None:
        self._now = 0.0

    def compute_event(self) -> float:
        self._now += 1.0
        return self._now


def test_a_pass_that_is_not_read_waited_for_what_the_last_one_waited_for() -> None:
    """The CPU takes one of the pass's four seconds, in the pass whose points are read and in the one that is taken to be like it."""
    graph, ledger = TimedGraph(), Ledger()
    stream = RecordedStream((), {}, graph, ledger, every=2)
    stream.begin_pass()
    graph.begin = graph.compute_event()
    asked = stream.point()
    stream.handed_over(Unit("ffn", 0), asked, stream.point())
    graph.results = graph.compute_event() + 1.0
    for passes in (1, 2):
        stream.begin_launch()
        stream.launched()
        assert stream.settle() == 4.0
        assert ledger.waits() == {"cpu": float(passes)}


class ClockedGraph(PlayedGraph):
    """Each copy takes a second, and kernels none."""

    def __init__(self) -> None:
        self._now = 0.0

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._now += 1.0

    def copy_event(self) -> float:
        return self._now

    compute_event = copy_event


@pytest.mark.parametrize("kinds", ["aaffff", "affffa", "afafaf", "ffa"])
def test_each_copy_is_booked_once_whichever_pass_it_is_for(kinds: str) -> None:
    """Between those of a pass come some that the next one begins with."""
    units, graph, ledger = [Unit({"a": "attn", "f": "ffn"}[kind], i) for i, kind in enumerate(kinds)], ClockedGraph(), Ledger()
    dram, slots = Still(units), {n: [torch.zeros(NBYTES, dtype=torch.uint8)] for n in ("attn", "ffn")}
    piece = (Segment(0, 0, NBYTES),)
    stream = RecordedStream([Streamed(u, dram.bytes[u], piece, ()) for u in units], slots, graph, ledger, every=1)
    stream.all_there()
    for number in range(1, 4):
        stream.begin_launch()
        stream.begin_pass()
        graph.begin = graph.compute_event()
        for unit in units:
            stream.enter(unit)
            stream.leave(unit)
        graph.results = graph.compute_event()
        stream.launched()
        stream.settle()
        assert ledger.totals()["h2d"].bytes >= NBYTES * (number * len(units) - len(stream.rounds.first)), "all that the launch waited for"
    stream.finish()
    total = ledger.totals()["h2d"]
    assert (total.bytes, total.busy_s) == (3 * NBYTES * len(units), 3.0 * len(units))
    assert "compute" not in ledger.waits(), "the link never rests"

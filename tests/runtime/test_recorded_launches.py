"""Launch after launch of recorded streams on a card that is played: whatever the order in which its streams go on, and whichever recording
goes on from which, each unit is computed with from its own bytes, and nothing waits for ever."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.memory.pieces import Segment
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.recorded.recorded_stream import RecordedStream, Streamed

NBYTES = 8


class Point:
    """How often a stream was told to come to it, and has."""

    def __init__(self) -> None:
        self.told = self.at = 0


class Act(NamedTuple):
    do: Callable[[], object]
    may: Callable[[], bool] = lambda: True


class PlayedCard:
    """A recorder of several recordings, one at a time. What is recorded goes to the streams at each launch. A stream does what it was given
    in order; :meth:`go_on` picks the stream."""

    def __init__(self, choose: random.Random):
        self._choose = choose
        self._recordings: list[list[Callable[[], object]]] = []
        self._given: dict[str, deque[Act]] = {name: deque() for name in ("kernels", "copies")}
        self._recording = False
        self.begin = self.results = Point()

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._recordings.append([])
        self._recording = True
        yield
        self._recording = False

    def _give(self, act: Callable[[], object]) -> None:
        if self._recording:
            self._recordings[-1].append(act)
        else:
            act()

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._give(lambda: self._given["copies"].append(Act(lambda: dst.copy_(src))))

    def _point(self, stream: str) -> Point:
        point = Point()

        def come() -> None:
            point.told += 1
            self._given[stream].append(Act(lambda: setattr(point, "at", point.at + 1)))

        self._give(come)
        return point

    def copy_event(self) -> Point:
        return self._point("copies")

    def compute_event(self) -> Point:
        return self._point("kernels")

    def _wait(self, stream: str, point: Point) -> None:
        told = point.told
        self._given[stream].append(Act(lambda: None, lambda: point.at >= told))

    def copy_waits(self, event: Point) -> None:
        self._give(lambda: self._wait("copies", event))

    def compute_waits(self, event: Point) -> None:
        self._give(lambda: self._wait("kernels", event))

    def at_launch(self, act: Callable[[], None]) -> None:
        self._give(act)

    def compute(self, what: Callable[[], object]) -> None:
        self._give(lambda: self._given["kernels"].append(Act(what)))

    def launch(self, recording: int) -> None:
        for act in self._recordings[recording]:
            act()

    def go_on(self) -> bool:
        """Do one act that may be done, of any stream; False where there is none."""
        ready = [stream for stream in self._given.values() if stream and stream[0].may()]
        if ready:
            self._choose.choice(ready).popleft().do()
        return bool(ready)

    @property
    def still(self) -> bool:
        return not any(self._given.values())

    def wait(self) -> None: ...
    def wait_results(self) -> None: ...

    def time_of(self, point: Point) -> float:
        return float(point.at)


@pytest.mark.parametrize("seed", range(60))
def test_every_unit_is_computed_with_from_its_own_bytes(seed: int) -> None:
    choose = random.Random(seed)
    kinds = [choose.choice(["attn", "ffn"]) for _ in range(choose.randint(1, 9))]
    units = [Unit(kind, i) for i, kind in enumerate(kinds)]
    slots = {name: [torch.zeros(NBYTES, dtype=torch.uint8) for _ in range(choose.randint(1, 3))] for name in dict.fromkeys(kinds)}
    card = PlayedCard(choose)
    streamed = [Streamed(u, torch.full((NBYTES,), i + 1, dtype=torch.uint8), (Segment(0, 0, NBYTES),), ()) for i, u in enumerate(units)]
    found: list[int] = []
    streams: list[RecordedStream] = []
    for _ in range(choose.randint(1, 3)):
        stream = RecordedStream(streamed, slots, card, Ledger(), like=streams[0] if streams else None)
        streams.append(stream)
        with card.recording():
            stream.begin_pass()
            for i, unit in enumerate(units):
                stream.enter(unit)
                buffer = stream.buffer(i)
                card.compute(lambda buffer=buffer: found.append(int(buffer[0])))
                stream.leave(unit)
            stream.end_pass()
    for i in stream.rounds.first:
        stream.buffer(i).copy_(streamed[i].source)
    stream.all_there()
    passes = choose.randint(2, 5)
    for _ in range(passes):
        number = choose.randrange(len(streams))
        streams[number].begin_launch()
        card.launch(number)
        streams[number].launched()
        for _ in range(choose.randint(0, 40)):
            card.go_on()
    while card.go_on():
        pass
    assert card.still, "streams wait for each other"
    assert found == passes * [i + 1 for i in range(len(units))]

"""Launch after launch of recorded streams on a card that is played: whatever the order in which its streams go on, and whichever recording
goes on from which, each unit is computed with from its own bytes, and nothing waits for ever."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from penstock.planner.contract.decided.placement import Unit
from penstock.runtime.memory.pieces import Segment
from penstock.runtime.moving.ledger import Ledger
from penstock.runtime.recorded.recorded_stream import RecordedStream, Streamed

NBYTES = 8


class Point:
    """Of a launch: in which one it happened last."""

    def __init__(self) -> None:
        self.at = 0


class Act(NamedTuple):
    do: Callable[[], object]
    may: Callable[[], bool] = lambda: True


class PlayedCard:
    """A recorder of several recordings, one at a time. What is recorded goes to the streams at each launch; a launch begins when the
    recorded acts of the one before are over. A stream does what it was given in order; :meth:`go_on` picks the stream."""

    def __init__(self, choose: random.Random, chains: tuple[str, ...]):
        self._choose = choose
        self._chains = chains
        self._recordings: list[dict[str, list[Act]]] = []
        self._launched: deque[dict[str, deque[Act]]] = deque()
        self._behind: dict[str, deque[Act]] = {name: deque() for name in chains}
        self._launches = self._over = 0
        self._recording = True
        self.begin = self.results = Point()

    def record(self) -> None:
        """What is given from now on is another recording's, until the first launch."""
        self._recordings.append({name: [] for name in ("kernels", *self._chains)})

    def _give(self, stream: str, act: Act) -> None:
        (self._recordings[-1][stream] if self._recording else self._behind[stream]).append(act)

    def copy(self, chain: str, dst: torch.Tensor, src: torch.Tensor) -> None:
        self._give(chain, Act(lambda: dst.copy_(src)))

    def _point(self, stream: str) -> Point:
        point = Point()
        self._give(stream, Act(lambda: setattr(point, "at", self._over + 1)))
        return point

    def copy_event(self, chain: str) -> Point:
        return self._point(chain)

    def compute_event(self) -> Point:
        return self._point("kernels")

    def _wait(self, stream: str, point: Point) -> None:
        self._give(stream, Act(lambda: None, lambda: point.at > self._over))

    def copy_waits(self, chain: str, event: Point) -> None:
        self._wait(chain, event)

    def compute_waits(self, event: Point) -> None:
        self._wait("kernels", event)

    def compute(self, what: Callable[[], object]) -> None:
        self._give("kernels", Act(what))

    def words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, 1, dtype=torch.int32)

    def _take(self, stream: str, word: torch.Tensor) -> None:
        self._give(stream, Act(word.zero_, lambda: int(word) == 1))

    def compute_takes(self, word: torch.Tensor) -> None:
        self._take("kernels", word)

    def copies_take(self, chain: str, word: torch.Tensor) -> None:
        self._take(chain, word)

    def follow(self, chain: str, event: Point) -> Point:
        launch = self._launches
        self._give(chain, Act(lambda: None, lambda: event.at >= launch and (self._over >= launch or not self._left(chain))))
        return self._point(chain)

    def _left(self, chain: str) -> bool:
        """Whether recorded copies of the launch that runs are left in ``chain``."""
        return bool(self._launched and self._launched[0][chain])

    def give(self, chain: str, word: torch.Tensor) -> Point:
        self._give(chain, Act(lambda: word.fill_(1)))
        return self._point(chain)

    def launch(self, recording: int) -> None:
        self._recording = False
        self._launches += 1
        self._launched.append({name: deque(acts) for name, acts in self._recordings[recording].items()})

    def go_on(self) -> bool:
        """Do one act that may be done, of any stream; False where there is none."""
        running = list(self._launched[0].values()) if self._launched else []
        ready = [stream for stream in (*running, *self._behind.values()) if stream and stream[0].may()]
        if not ready:
            return False
        self._choose.choice(ready).popleft().do()
        if self._launched and not any(self._launched[0].values()):
            self._launched.popleft()
            self._over += 1
        return True

    @property
    def still(self) -> bool:
        return not self._launched and not any(self._behind.values())

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
    card = PlayedCard(choose, tuple(slots))
    streamed = [Streamed(u, torch.full((NBYTES,), i + 1, dtype=torch.uint8), (Segment(0, 0, NBYTES),), ()) for i, u in enumerate(units)]
    found: list[int] = []
    streams: list[RecordedStream] = []
    for _ in range(choose.randint(1, 3)):
        card.record()
        stream = RecordedStream(streamed, slots, card, Ledger(), like=streams[0] if streams else None)
        streams.append(stream)
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
        card.launch(number)
        streams[number].launched()
        for _ in range(choose.randint(0, 40)):
            card.go_on()
    while card.go_on():
        pass
    assert card.still, "streams wait for each other"
    assert found == passes * [i + 1 for i in range(len(units))]

"""A recorder whose card is played: its streams go on in any order that words and points allow."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import torch


class Point:
    """Of a launch: in which one it happened last."""

    def __init__(self) -> None:
        self.at = 0


class Act(NamedTuple):
    do: Callable[[], object]
    may: Callable[[], bool] = lambda: True


class PlayedCard:
    """A recorder of several recordings, one at a time. What is recorded goes to the stream of kernels at each launch; a launch begins when
    the recorded acts of the one before are over. A stream does what it was given in order; :meth:`go_on` picks the stream."""

    def __init__(self, choose: random.Random, chains: tuple[str, ...]):
        self._choose = choose
        self._recordings: list[list[Act]] = []
        self._launched: deque[deque[Act]] = deque()
        self._given: dict[str, deque[Act]] = {name: deque() for name in chains}
        self._launches = self._over = 0
        self.copies = 0
        self.begin = self.results = Point()

    def record(self) -> None:
        """What is recorded from now on is another recording's."""
        self._recordings.append([Act(lambda: None)])

    def copy(self, chain: str, dst: torch.Tensor, src: torch.Tensor) -> None:
        self.copies += 1
        self._given[chain].append(Act(lambda: dst.copy_(src)))

    def _point(self, stream: list[Act] | deque[Act]) -> Point:
        point = Point()
        stream.append(Act(lambda: setattr(point, "at", self._over + 1)))
        return point

    def compute_event(self) -> Point:
        return self._point(self._recordings[-1])

    def compute(self, what: Callable[[], object]) -> None:
        """A kernel is recorded."""
        self._recordings[-1].append(Act(what))

    def words(self, count: int) -> torch.Tensor:
        return torch.zeros(count, 1, dtype=torch.int32)

    def compute_takes(self, word: torch.Tensor) -> None:
        self._recordings[-1].append(Act(word.zero_, lambda: int(word) == 1))

    def follow(self, chain: str, event: Point) -> Point:
        launch = self._launches
        self._given[chain].append(Act(lambda: None, lambda: event.at >= launch))
        return self._point(self._given[chain])

    def give(self, chain: str, word: torch.Tensor) -> Point:
        def given() -> None:
            assert int(word) == 0, "compute did not wait for this unit's last copy"
            word.fill_(1)

        self._given[chain].append(Act(given))
        return self._point(self._given[chain])

    def launch(self, recording: int = -1) -> None:
        self._launches += 1
        self._launched.append(deque(self._recordings[recording]))

    def go_on(self) -> bool:
        """Do one act that may be done, of any stream; False where there is none."""
        running = [self._launched[0]] if self._launched else []
        ready = [stream for stream in (*running, *self._given.values()) if stream and stream[0].may()]
        if not ready:
            return False
        self._choose.choice(ready).popleft().do()
        if self._launched and not self._launched[0]:
            self._launched.popleft()
            self._over += 1
        return True

    def finish(self) -> None:
        """All that was given is done."""
        while self.go_on():
            pass
        assert not self._launched and not any(self._given.values()), "streams wait for each other"

    def wait(self) -> None: ...
    def wait_results(self) -> None: ...
    def hold(self) -> None: ...
    def yield_copies(self) -> None: ...

    def time_of(self, point: Point) -> float:
        return float(point.at)

"""The stages as queues that share links and drives. The clock jumps from the end of one piece of work to the next end."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from penstock.planner.common.timeline.spans import COMPUTE, CPU, D2H, EXPERTS, H2D, HOP, KV, LAUNCH, SSD, SSD_WRITE
from penstock.planner.simulate.lanes.wait import Wait

WHOLE = 1 << 20
"""The speed of a lane that has its link for itself. Work is nanoseconds times this."""
FOREVER = 1 << 80
"""More nanoseconds than anything takes."""
NS = 10**9
"""Of a second. Times are whole nanoseconds: sums are exact, so a state that comes again is the same one."""

LINKS = {SSD: SSD, SSD_WRITE: SSD, H2D: H2D, KV: H2D, EXPERTS: H2D, D2H: D2H, COMPUTE: COMPUTE, CPU: CPU, HOP: HOP, LAUNCH: LAUNCH}
"""Track -> the link that it shares with others."""


def ns(seconds: float) -> int:
    """``seconds`` in whole nanoseconds."""
    return round(seconds * NS)


class Work(NamedTuple):
    """``tag`` says what it is, the same in every pass; ``done`` is called at its end."""

    tag: tuple[object, ...]
    name: str
    nbytes: int
    done: Callable[[], None]


class Moving:
    """Work in flight: what is left of it, at full speed, and when it began."""

    __slots__ = ("work", "left", "begun")

    def __init__(self, work: Work, length_ns: int, begun: int):
        self.work, self.left, self.begun = work, length_ns * WHOLE, begun


class Lane:
    """First come, first served, ``width`` at a time: those in flight have equal shares."""

    __slots__ = ("track", "link", "width", "moving", "queue", "busy_ns", "nbytes", "idle_since")

    def __init__(self, track: str):
        self.track, self.link, self.width = track, LINKS[track], 1
        self.moving: list[Moving] = []
        self.queue: deque[tuple[Work, int]] = deque()
        self.busy_ns = 0
        self.nbytes = 0
        self.idle_since = 0


Booked = Callable[[str, str, int, int, int], None]
"""Called with (track, name, begin, end, bytes) of work that is over, in nanoseconds."""


class Clock:
    """The time, and the lanes of all ranks. ``links``: cards, their links' GB/s alone added up -> the share of each that is left while all
    carry."""

    def __init__(self, links: Callable[[int, float], float] = lambda cards, alone_gbps: 1.0):
        self.now = 0
        self._links = links
        self._all: list[tuple[Lanes, Lane]] = []
        self._speeds: dict[int, list[tuple[Lanes, Lane, int]]] = {}

    def take(self, lanes: Lanes) -> None:
        """A rank more."""
        self._all += [(lanes, lane) for lane in lanes.of.values()]

    def step(self) -> bool:
        """Go on to the next end of anything; False when nothing is in flight."""
        mask = 0
        for i, (_, lane) in enumerate(self._all):
            if lane.moving:
                mask |= 1 << i
        if not mask:
            return False
        speeds = self._speeds.get(mask)
        if speeds is None:
            speeds = self._speeds[mask] = self._share([one for i, one in enumerate(self._all) if mask >> i & 1])
        after = FOREVER
        for _, lane, speed in speeds:
            moving = lane.moving
            for each in moving:
                needs = -(-each.left * len(moving) // speed)
                if needs < after:
                    after = needs
        self.now += after
        over = []
        for lanes, lane, speed in speeds:
            moving = lane.moving
            passed = -(-after * speed // len(moving))
            lane.busy_ns += after
            for each in moving:
                each.left -= passed
                if each.left <= 0:
                    over.append((lanes, lane, each))
        for lanes, lane, each in over:
            lanes.end(lane, each)
        return True

    def rebase(self) -> int:
        """Begin to count time anew; the time until now."""
        passed, self.now = self.now, 0
        for _, lane in self._all:
            lane.idle_since -= passed
            for each in lane.moving:
                each.begun -= passed
        return passed

    def _share(self, active: list[tuple[Lanes, Lane]]) -> list[tuple[Lanes, Lane, int]]:
        """Ranks of one host share its bus, its drive, its CPU and what its links carry at once."""
        at_work: dict[Lanes, set[str]] = {}
        for lanes, lane in active:
            at_work.setdefault(lanes, set()).add(lane.link)
        alone: dict[tuple[Lanes, str], float] = {}
        asked: dict[int, float] = {}
        for lanes, links in at_work.items():
            here = [(other, others) for other, others in at_work.items() if other.host == lanes.host]
            beside = lanes.beside if lanes.beside and all(any(link in others for _, others in here) for link in lanes.beside) else {}
            for link in links:
                carried = 1.0
                if link in (H2D, SSD, CPU):
                    those = [other for other, others in here if link in others]
                    alone_gbps = math.fsum(other.link_gbps for other in those)
                    carried = self._links(len(those), alone_gbps) if link == H2D else 1 / len(those)
                alone[lanes, link] = beside.get(link, 1.0) * carried
                asked[lanes.host] = asked.get(lanes.host, 0.0) + lanes.bus.get(link, 0.0) * alone[lanes, link]

        def speed(lanes: Lanes, lane: Lane) -> float:
            shared = sum(other.link == lane.link for whose, other in active if whose is lanes)
            slower = max(1.0, asked[lanes.host]) if lane.link in lanes.bus else 1.0
            return WHOLE * alone[lanes, lane.link] / slower / shared

        return [(lanes, lane, max(1, round(speed(lanes, lane)))) for lanes, lane in active]


class Lanes:
    """All lanes of a rank, or of a process that has none beside it. Lanes of one link have equal shares of it.

    ``bus``: link -> the share of the host's memory bus that it takes at full speed. Where those at work ask for more than all of it, each
    goes on slower by as much. ``beside``: link -> the share of its speed that is left while all of these are at work. ``host``: which one
    of several this rank is on. ``link_gbps``: of its card's link alone.
    """

    def __init__(
        self,
        bus: Mapping[str, float],
        beside: Mapping[str, float],
        booked: Booked | None = None,
        clock: Clock | None = None,
        host: int = 0,
        link_gbps: float = 0.0,
    ):
        self.of = {track: Lane(track) for track in LINKS}
        self.booked = booked
        self.bus, self.beside, self.host, self.link_gbps = bus, beside, host, link_gbps
        self._clock = clock or Clock()
        self._clock.take(self)

    @property
    def now(self) -> int:
        """Nanoseconds on the clock."""
        return self._clock.now

    def add(self, track: str, work: Work, length_ns: int) -> None:
        """Queue ``work`` that takes so long if nothing else is in flight."""
        lane = self.of[track]
        if len(lane.moving) < lane.width:
            lane.moving.append(Moving(work, length_ns, self.now))
        else:
            lane.queue.append((work, length_ns))

    def do(self, track: str, work: Work, length_ns: int) -> Wait:
        """Queue ``work`` as :meth:`add` does -> until its lane is idle."""
        self.add(track, work, length_ns)
        return Wait(lambda: not self.of[track].moving, work.name)

    def cut(self, track: str) -> int:
        """Leave off what moves on ``track``, if anything does: nanoseconds that were left of it, if nothing else is in flight."""
        lane = self.of[track]
        left = sum(moving.left for moving in lane.moving)
        lane.moving.clear()
        lane.idle_since = self.now
        return -(-left // WHOLE)

    def step(self) -> bool:
        """Go on to the next end of anything; False when nothing is in flight."""
        return self._clock.step()

    def clear(self, *tracks: str) -> None:
        """Forget what is queued on ``tracks``."""
        for track in tracks:
            self.of[track].queue.clear()
            self.of[track].moving.clear()

    def rebase(self) -> int:
        """Begin to count time anew; the time until now."""
        return self._clock.rebase()

    def state(self) -> tuple[object, ...]:
        """What is in flight and queued."""
        return tuple(
            (tuple((each.work.tag, each.left) for each in lane.moving), tuple((work.tag, length) for work, length in lane.queue))
            for lane in self.of.values()
        )

    def end(self, lane: Lane, over: Moving) -> None:
        """``over`` is done, the next work of its ``lane`` begins."""
        lane.moving.remove(over)
        work, begun = over.work, max(over.begun, lane.idle_since)  # one span after the other, also of what moved at the same time
        lane.idle_since = self.now
        lane.nbytes += work.nbytes
        if lane.queue:
            lane.moving.append(Moving(*lane.queue.popleft(), self.now))
        if self.booked is not None:
            self.booked(lane.track, work.name, begun, self.now, work.nbytes)
        work.done()

"""The stages as queues that share links and drives. The clock jumps from the end of one piece of work to the next end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from penstock.planner.common.timeline.spans import COMPUTE, CPU, D2H, EXPERTS, H2D, KV, SSD, SSD_WRITE

WHOLE = 1 << 20
"""The speed of a lane that has its link for itself. Work is nanoseconds times this."""
FOREVER = 1 << 80
"""More nanoseconds than anything takes."""
NS = 10**9
"""Of a second. Times are whole nanoseconds: sums are exact, so a state that comes again is the same one."""

LINKS = {SSD: SSD, SSD_WRITE: SSD, H2D: H2D, KV: H2D, EXPERTS: H2D, D2H: D2H, COMPUTE: COMPUTE, CPU: CPU}
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


class Lanes:
    """All lanes and the time. Lanes of one link have equal shares of it.

    ``bus``: link -> the share of the host's memory bus that it takes at full speed. Where those at work ask for more than all of it, each
    goes on slower by as much. ``beside``: link -> the share of its speed that is left while all of these are at work.
    """

    def __init__(self, bus: Mapping[str, float], beside: Mapping[str, float], booked: Booked | None = None):
        self.now = 0
        self.of = {track: Lane(track) for track in LINKS}
        self.booked = booked
        self._bus, self._beside = bus, beside
        self._lanes = tuple(self.of.values())
        self._speeds: dict[int, list[tuple[Lane, int]]] = {}

    def add(self, track: str, work: Work, length_ns: int) -> None:
        """Queue ``work`` that takes so long if nothing else is in flight."""
        lane = self.of[track]
        if len(lane.moving) < lane.width:
            lane.moving.append(Moving(work, length_ns, self.now))
        else:
            lane.queue.append((work, length_ns))

    def step(self) -> bool:
        """Go on to the next end of anything; False when nothing is in flight."""
        mask = 0
        for i, lane in enumerate(self._lanes):
            if lane.moving:
                mask |= 1 << i
        if not mask:
            return False
        speeds = self._speeds.get(mask)
        if speeds is None:
            speeds = self._speeds[mask] = self._share([lane for i, lane in enumerate(self._lanes) if mask >> i & 1])
        after = FOREVER
        for lane, speed in speeds:
            moving = lane.moving
            for each in moving:
                needs = -(-each.left * len(moving) // speed)
                if needs < after:
                    after = needs
        self.now += after
        over = []
        for lane, speed in speeds:
            moving = lane.moving
            passed = -(-after * speed // len(moving))
            lane.busy_ns += after
            for each in moving:
                each.left -= passed
                if each.left <= 0:
                    over.append((lane, each))
        for lane, each in over:
            self._end(lane, each)
        return True

    def clear(self, *tracks: str) -> None:
        """Forget what is queued on ``tracks``."""
        for track in tracks:
            self.of[track].queue.clear()
            self.of[track].moving.clear()

    def rebase(self) -> int:
        """Begin to count time anew; the time until now."""
        passed, self.now = self.now, 0
        for lane in self._lanes:
            lane.idle_since -= passed
            for each in lane.moving:
                each.begun -= passed
        return passed

    def state(self) -> tuple[object, ...]:
        """What is in flight and queued."""
        return tuple(
            (tuple((each.work.tag, each.left) for each in lane.moving), tuple((work.tag, length) for work, length in lane.queue))
            for lane in self._lanes
        )

    def _end(self, lane: Lane, over: Moving) -> None:
        lane.moving.remove(over)
        work, begun = over.work, max(over.begun, lane.idle_since)  # one span after the other, also of what moved at the same time
        lane.idle_since = self.now
        lane.nbytes += work.nbytes
        if lane.queue:
            lane.moving.append(Moving(*lane.queue.popleft(), self.now))
        if self.booked is not None:
            self.booked(lane.track, work.name, begun, self.now, work.nbytes)
        work.done()

    def _share(self, active: list[Lane]) -> list[tuple[Lane, int]]:
        links = {lane.link for lane in active}
        left = self._beside if self._beside and self._beside.keys() <= links else {}
        asked = max(1.0, sum(self._bus.get(link, 0.0) * left.get(link, 1.0) for link in links))

        def speed(lane: Lane) -> float:
            shared = sum(other.link == lane.link for other in active)
            return WHOLE * left.get(lane.link, 1.0) / (asked if lane.link in self._bus else 1.0) / shared

        return [(lane, max(1, round(speed(lane)))) for lane in active]

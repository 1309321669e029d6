"""Streams that are read only as long as they tell something, and then left: what a load would wait for behind that is not waited for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

from bench.sse import Address, Reply, ask

LOOK_S = 0.005
"""Between two looks at what has come."""
Body = Mapping[str, Any]


class LeftEarly(Exception):
    """A reply ended, or failed, before what was waited for; the message says which."""


class Streams:
    """Requests under way at ``address``; all that are still read are left behind the ``with`` block of :meth:`read`."""

    def __init__(self, address: Address, path: str):
        self._address, self._path = address, path
        self._tasks: list[asyncio.Task[Reply]] = []
        self.replies: list[Reply] = []
        """In the order in which they were asked."""

    @contextmanager
    def read(self) -> Iterator[None]:
        try:
            yield
        finally:
            for task in self._tasks:
                task.cancel()

    async def left(self) -> None:
        """All connections are closed."""
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def ask(self, body: Body) -> Reply:
        """It fills while it is read."""
        reply = Reply(time.perf_counter())
        self.replies.append(reply)
        self._tasks.append(asyncio.create_task(ask(self._address, self._path, body, reply=reply)))
        return reply

    async def until(self, told: Callable[[], bool]) -> None:
        """LeftEarly where a request failed, or nobody is left to tell."""
        while not told():
            if failed := next((reply for reply in self.replies if reply.error), None):
                raise LeftEarly(f"status {failed.status}: {failed.error}")
            if all(task.done() for task in self._tasks):
                raise LeftEarly(f"all {len(self.replies)} replies ended before")
            await asyncio.sleep(LOOK_S)


async def first_tokens(address: Address, path: str, bodies: Sequence[Body], arrivals_s: Sequence[float]) -> list[Reply]:
    """Each asked at its time, whatever became of those before it, and all read until the last has its first token. A reply's TTFT counts
    from its time on. LeftEarly where one failed."""
    streams, start = Streams(address, path), time.perf_counter()
    with streams.read():
        for body, due_s in zip(bodies, arrivals_s, strict=True):
            await asyncio.sleep(start + due_s - time.perf_counter())
            streams.ask(body).begun_s = start + due_s
        await streams.until(lambda: all(reply.times_s for reply in streams.replies))
    await streams.left()
    return streams.replies


@dataclass(frozen=True)
class Stair:
    """A time in which ``rows`` decode and nothing else comes or goes."""

    rows: int
    gap_s: float
    """From one token to the next: the median over rows of each one's mean, since a loaded client reads several at a time."""


async def climb(address: Address, path: str, bodies: Sequence[Body], counts: Sequence[int], steps: int) -> list[Stair]:
    """Rows join until there are as many as the first of ``counts``; ``steps`` tokens behind the first one of the newest the next join, and
    so on. ``counts`` rise. LeftEarly where a reply failed, or ended before the last stair."""
    streams, stairs = Streams(address, path), list[Stair]()
    with streams.read():
        for count in counts:
            newest = [streams.ask(body) for body in bodies[len(streams.replies) : count]]
            await streams.until(lambda newest=newest: all(len(reply.times_s) > steps for reply in newest))  # type: ignore[misc]
            since, until = (max(reply.times_s[at] for reply in newest) for at in (0, steps))
            if ended := [reply for reply in streams.replies if reply.whole and reply.times_s[-1] < until]:
                raise LeftEarly(
                    f"{count} rows never decoded together: {len(ended)} of them ended before, with {len(ended[0].times_s)} tokens"
                )
            stairs.append(Stair(count, gap_between([reply.times_s for reply in streams.replies], since, until)))
    await streams.left()
    return stairs


def gap_between(rows: Sequence[Sequence[float]], since_s: float, until_s: float) -> float:
    """The median over rows of each one's mean time from one token to the next, of those that came within the time."""
    inside = [[at for at in times if since_s <= at <= until_s] for times in rows]
    found = [(times[-1] - times[0]) / (len(times) - 1) for times in inside if len(times) > 1]
    if not found:
        raise LeftEarly("no row has two tokens within the time")
    return median(found)

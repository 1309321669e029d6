"""When copies ran, and what the link waited for between them: from one event behind each copy."""

from __future__ import annotations

from typing import NamedTuple

from penstock.runtime.memory.device import CopyDevice, Event
from penstock.runtime.moving.ledger import Ledger


class Cleared(NamedTuple):
    """What a unit's first copy waited for: the host times at which the window reached the unit and at which DRAM held it, and the kernels
    that read its slot last."""

    window_s: float
    dram_s: float
    left: Event | None


class Queued(NamedTuple):
    """A copy on its way, given to the device at ``issued_s`` of the host. ``cleared`` is set on a unit's first one."""

    issued_s: float
    end: Event
    unit: object
    """Says what it is by ``str``, which takes too long to be asked before it is booked."""
    nbytes: int
    last: bool
    cleared: Cleared | None


class Booking:
    """Books copies of the stage ``h2d`` on ``track`` in the order in which they were queued."""

    def __init__(self, device: CopyDevice, ledger: Ledger, track: str):
        self._device, self._ledger, self._track = device, ledger, track
        self._idle_since: float | None = None

    def anew(self) -> Booking:
        """The same behind a pause, which nothing waited for."""
        return Booking(self._device, self._ledger, self._track)

    def book(self, copy: Queued) -> None:
        """``copy`` is over."""
        end_s = self._device.time_of(copy.end)
        start_s = min(end_s, self._begun_s(copy))
        if copy.cleared is not None and self._idle_since is not None:
            self._book_idle(str(copy.unit), copy.cleared, self._idle_since, start_s)
        self._ledger.add("h2d", copy.unit, start_s, end_s, copy.nbytes, self._track)
        self._idle_since = end_s

    def _begun_s(self, copy: Queued) -> float:
        """When ``copy`` began: it was given to the device, the copy before it was over and its slot was left. An event in front of every
        copy would say the same for a third of the host's time."""
        left = copy.cleared.left if copy.cleared is not None else None
        return max(copy.issued_s, self._idle_since or 0.0, self._device.time_of(left) if left is not None else 0.0)

    def _book_idle(self, unit: str, cleared: Cleared, since: float, until: float) -> None:
        """Book what the link waited for before a unit's first copy: first for the window, which follows compute; then for DRAM; then for
        the kernels that read its slot last."""
        window_s, dram_s = min(cleared.window_s, until), min(cleared.dram_s, until)
        left_s = min(self._device.time_of(cleared.left), until) if cleared.left is not None else dram_s
        self._ledger.waited(self._track, "compute", unit, since, window_s)
        self._ledger.waited(self._track, "ssd", unit, max(since, window_s), dram_s)
        self._ledger.waited(self._track, "compute", unit, max(since, dram_s), left_s)

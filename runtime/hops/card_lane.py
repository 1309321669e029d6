"""A stream of a card, by the driver: torch has no copies to what another process took, no words, and gives one stream to several askers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from penstock.runtime.memory.bare_copies import BareCopies, made_stream, unmade_stream, wait_for_value, write_value


class CardLane:
    """``hops.peer_hop.Lane`` of ``device``, whose context the calling thread has current."""

    def __init__(self, device: torch.device):
        self._device = device
        self._handle = made_stream()
        self._stream = torch.cuda.ExternalStream(self._handle, device)
        self._copies = BareCopies(self._handle)
        self._made = torch.cuda.Event()
        self._kept: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()

    def follow(self) -> None:
        self._made.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._made)

    def copy(self, into: int, source: int, nbytes: int) -> None:
        self._copies(into, source, nbytes)

    def wait_word(self, address: int, value: int) -> None:
        wait_for_value(self._handle, address, value)

    def write_word(self, address: int, value: int) -> None:
        write_value(self._handle, address, value)

    def keep(self, tensor: torch.Tensor) -> None:
        self._kept.append((self._now(), tensor))
        while self._kept and self._kept[0][0].query():
            self._kept.popleft()

    def mark(self) -> Callable[[], None]:
        done = self._now()
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)

    def _now(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream)
        return event

    def settle(self) -> None:
        self._stream.synchronize()
        self._kept.clear()

    def close(self) -> None:
        self.settle()
        unmade_stream(self._handle)

"""A stream of a card, by the driver: torch has no copies to what another process took, no words, and gives one stream to several askers."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.runtime.memory.bare_copies import BareCopies, BareEvent, made_stream, unmade_stream, wait_for_value, write_value


class CardLane:
    """``hops.peer_hop.Lane`` of ``device``, whose context the calling thread has current. A hop is a layer's and a part's: all that it
    asks of the driver goes past torch, whose events take the host several times as long."""

    def __init__(self, device: torch.device):
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._handle = made_stream()
        self._stream = torch.cuda.ExternalStream(self._handle, device)
        self._copies = BareCopies(self._handle)
        self._made = self._recorded()
        self._idle: list[BareEvent] = []
        """Events that nobody waits for any more."""

    def _recorded(self) -> BareEvent:
        event = BareEvent(timed=False)
        event.record(self._stream)
        return event

    def follow(self) -> None:
        self._made.record_again(self._computing)
        self._made.hold(self._handle)

    @property
    def _computing(self) -> int:
        """The handle of the stream that computes."""
        return torch._C._cuda_getCurrentRawStream(self._index)

    def copy(self, into: int, source: int, nbytes: int) -> None:
        self._copies(into, source, nbytes)

    def wait_word(self, address: int, value: int) -> None:
        wait_for_value(self._handle, address, value)

    def write_word(self, address: int, value: int) -> None:
        write_value(self._handle, address, value)

    def mark(self) -> Callable[[], None]:
        done = self._idle.pop() if self._idle else self._recorded()
        done.record_again(self._handle)

        def wait() -> None:
            done.hold(self._computing)
            self._idle.append(done)  # who waits already waits for what it was recorded behind, whatever it is recorded behind next

        return wait

    def settle(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.settle()
        unmade_stream(self._handle)

"""A stream of a card, by the driver: torch has no copies to what another process took, and no words."""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.runtime.memory.bare_copies import BareCopies, wait_for_value, write_value


class CardLane:
    """``hops.peer_hop.Lane`` of ``device``, whose context the calling thread has current."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._copies = BareCopies(self._stream.cuda_stream)
        self._made = torch.cuda.Event()

    def follow(self) -> None:
        self._made.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._made)

    def copy(self, into: int, source: int, nbytes: int) -> None:
        self._copies(into, source, nbytes)

    def wait_word(self, address: int, value: int) -> None:
        wait_for_value(self._stream.cuda_stream, address, value)

    def write_word(self, address: int, value: int) -> None:
        write_value(self._stream.cuda_stream, address, value)

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._stream)

    def mark(self) -> Callable[[], None]:
        done = torch.cuda.Event()
        done.record(self._stream)
        return lambda: torch.cuda.current_stream(self._device).wait_event(done)

    def settle(self) -> None:
        self._stream.synchronize()

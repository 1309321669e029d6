"""The stream of a card that computes, where hops are taken from: by the driver's words, and by a kernel."""

from __future__ import annotations

import torch

from penstock.runtime.memory.bare_copies import wait_for_value, write_value


class ComputingStream:
    """``hops.peer_hop.Computing`` of ``device``: whatever stream the calling thread computes on."""

    def __init__(self, device: torch.device):
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._seen: dict[tuple[int, int], torch.Tensor] = {}
        """By address and size: to make a tensor takes a host as long as to launch a kernel."""

    def wait_word(self, address: int, value: int) -> None:
        wait_for_value(self._handle, address, value)

    def write_word(self, address: int, value: int) -> None:
        write_value(self._handle, address, value)

    def take(self, into: torch.Tensor, source: int) -> None:
        there = self._seen.get((source, into.nbytes))
        if there is None:
            there = self._seen[source, into.nbytes] = torch.as_tensor(_Bytes(source, into.nbytes), device=self._device)
        torch.mul(there.view(into.dtype).view(into.shape), 1, out=into)  # a kernel: a copy would wait for the copy engine

    def settle(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    @property
    def _handle(self) -> int:
        return torch._C._cuda_getCurrentRawStream(self._device.index)


class _Bytes:
    """VRAM that this process has open, as torch reads it without a copy."""

    def __init__(self, address: int, nbytes: int):
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}

"""The compute device as the ring sees it: copies and events, never a host synchronize on the way."""

from __future__ import annotations

import time
from typing import Protocol

import torch


class Event(Protocol):
    """A point in a stream of device work."""


class CopyDevice(Protocol):
    """One copy stream beside one compute stream."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Queue a host-to-device copy on the copy stream."""

    def copy_event(self) -> Event:
        """The point in the copy stream after everything queued so far."""

    def compute_event(self) -> Event:
        """The point in the compute stream after everything issued so far."""

    def copy_waits(self, event: Event) -> None:
        """Copies queued from now on begin after ``event``."""

    def compute_waits(self, event: Event) -> None:
        """Kernels issued from now on begin after ``event``."""

    def host_waits(self, event: Event) -> None:
        """Block the calling thread until ``event`` has happened."""

    def done(self, event: Event) -> bool:
        """Whether ``event`` has happened; never blocks."""

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        """Page-locked ``host`` (uint8) as a tensor that kernels read over the link, without a copy."""

    def time_of(self, event: Event) -> float:
        """When an event that has happened did, in seconds of ``time.perf_counter``."""


class CudaDevice:
    """A CUDA card: the copy stream has the higher priority, so copies never queue behind kernels."""

    def __init__(self, index: int = 0):
        self.device = torch.device("cuda", index)
        self._copies = torch.cuda.Stream(self.device, priority=-1)
        self._compute = torch.cuda.current_stream(self.device)
        self._base = self._record(self._compute)
        self._base.synchronize()
        self._base_s = time.perf_counter()

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        with torch.cuda.stream(self._copies):
            dst.copy_(src, non_blocking=True)

    def copy_event(self) -> torch.cuda.Event:
        return self._record(self._copies)

    def compute_event(self) -> torch.cuda.Event:
        return self._record(self._compute)

    def copy_waits(self, event: torch.cuda.Event) -> None:
        self._copies.wait_event(event)

    def compute_waits(self, event: torch.cuda.Event) -> None:
        self._compute.wait_event(event)

    def host_waits(self, event: torch.cuda.Event) -> None:
        event.synchronize()

    def alias(self, host: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(_HostBytes(host), device=self.device)

    def done(self, event: torch.cuda.Event) -> bool:
        return event.query()

    def time_of(self, event: torch.cuda.Event) -> float:
        return self._base_s + self._base.elapsed_time(event) / 1e3

    def _record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(stream)
        return event


class _HostBytes:
    """Registered host memory under its device address, which unified addressing makes the same."""

    def __init__(self, host: torch.Tensor):
        self._host = host
        self.__cuda_array_interface__ = {"shape": (host.numel(),), "typestr": "|u1", "data": (host.data_ptr(), False), "version": 3}

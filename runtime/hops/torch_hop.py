"""Hops over torch.distributed: NCCL between cards, gloo between processes without."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist

from penstock.runtime.hops.hop import Hop, HopMeter

MOST_SENT = 8
"""Hidden states on their way from here, in a pass that is not in parts: an older one is waited for."""


class Sent:
    """Hidden states on their way from here, ``most`` of them."""

    def __init__(self) -> None:
        self.most = MOST_SENT
        self._going: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def add(self, work: dist.Work, hidden: torch.Tensor) -> None:
        self._going.append((work, hidden))
        self.settle(self.most)

    def settle(self, left: int = 0) -> None:
        """Wait for all but ``left`` of them."""
        while len(self._going) > left:
            self._going.popleft()[0].wait()

    def clear(self) -> None:
        """Nobody waits for them any more."""
        self._going.clear()


class TorchHop:
    """Between this rank and ``peer``, by ``group``."""

    def __init__(self, group: dist.ProcessGroup, peer: int, meter: HopMeter, sent: Sent):
        self._group, self._peer, self._meter, self._sent = group, peer, meter, sent

    def receive(self, into: torch.Tensor) -> None:
        self.coming(into)()

    def coming(self, into: torch.Tensor) -> Callable[[], None]:
        work = dist.irecv(_as_bytes(into), self._peer, group=self._group)

        def arrive() -> None:
            begun = time.perf_counter()
            if work is not None:
                work.wait()
            self._meter.received += 1
            self._meter.received_bytes += into.nbytes
            self._meter.waited_s += time.perf_counter() - begun

        return arrive

    def send(self, hidden: torch.Tensor) -> None:
        hidden = hidden.contiguous()
        work = dist.isend(_as_bytes(hidden), self._peer, group=self._group)
        self._meter.sent_bytes += hidden.nbytes
        if work is not None:
            self._sent.add(work, hidden)


class StagedHop:
    """Between two ranks of one card, which NCCL refuses: through memory of both processes, by ``hop`` of gloo. The host waits for it."""

    def __init__(self, hop: Hop):
        self._hop = hop

    def receive(self, into: torch.Tensor) -> None:
        self.coming(into)()

    def coming(self, into: torch.Tensor) -> Callable[[], None]:
        staged = torch.empty(into.shape, dtype=into.dtype)
        come = self._hop.coming(staged)

        def arrive() -> None:
            come()
            into.copy_(staged)

        return arrive

    def send(self, hidden: torch.Tensor) -> None:
        self._hop.send(hidden.cpu())


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).view(-1) if tensor.dim() else tensor.view(1).view(torch.uint8)

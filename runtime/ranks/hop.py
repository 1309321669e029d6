"""Hidden states from rank to rank, over torch.distributed: NCCL between cards, gloo between processes without."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from penstock.runtime.company.company import PATIENCE

MOST_SENT = 8
"""Hidden states on their way from here, beside those of a pass's parts: an older one is waited for."""
_TRIED = 16 << 10
"""Bytes of a hop that warms a pair up."""


class Hop(Protocol):
    """One way between two ranks. What comes, comes in the order in which it was sent."""

    def receive(self, into: torch.Tensor) -> None:
        """Fill ``into``, for kernels that are issued from now on."""

    def coming(self, into: torch.Tensor) -> Callable[[], None]:
        """The same in two: ``into`` is filled meanwhile, for kernels that are issued after the call of what is returned."""

    def send(self, hidden: torch.Tensor) -> None:
        """Once the kernels that were issued so far have made it. ``hidden`` may not be written to any more."""


@dataclass
class HopMeter:
    """What went by hops, as far as the host knows."""

    received: int = 0
    """Hops that came."""
    received_bytes: int = 0
    sent_bytes: int = 0
    waited_s: float = 0.0
    """Seconds in which the host waited for what came; a card waits by itself."""


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


class Hops:
    """All ways of ``rank`` among those of all ranks, ``ways`` (from, to), by which a pass goes round; these are warmed up. All ranks make
    theirs at the same time. ``without_cards`` is a group of gloo, which stays its giver's. By it goes all of ranks on ``one_card``, too.

    With NCCL each of ``ways`` is a communicator with a stream of its own, so that nothing on its way from here holds up what comes.
    Costs their buffers, some MB a channel and peer.
    """

    def __init__(
        self,
        rank: int,
        ways: Sequence[tuple[int, int]],
        device: torch.device,
        without_cards: dist.ProcessGroup,
        one_card: bool = False,
    ):
        self.rank, self.count = rank, 1 + max(map(max, ways))
        self.meter = HopMeter()
        self._sent = Sent()
        self._device = device
        self._groups: list[dist.ProcessGroup] = []
        self._staged = one_card and device.type == "cuda"
        if device.type == "cuda" and not one_card:
            self._every = self._group(list(range(self.count)))
            edges = {edge: self._group(sorted(edge)) for edge in ways}
        else:
            self._every = without_cards
            edges = dict.fromkeys(ways, without_cards)
        self._before = {one: self._hop(group, one) for (one, other), group in edges.items() if other == rank}
        self._behind = {other: self._hop(group, other) for (one, other), group in edges.items() if one == rank}
        self._warm_up(ways)

    def before(self, peer: int) -> Hop:
        """From ``peer``, which has a layer before one of ours."""
        return self._before[peer]

    def behind(self, peer: int) -> Hop:
        """To ``peer``, which has a layer behind one of ours."""
        return self._behind[peer]

    def of(self, peer: int) -> Hop:
        """To and from any rank, for what comes once a pass."""
        return self._hop(self._every, peer)

    def _hop(self, group: dist.ProcessGroup, peer: int) -> Hop:
        hop = TorchHop(group, peer, self.meter, self._sent)
        return StagedHop(hop) if self._staged else hop

    @property
    def others(self) -> Iterator[int]:
        """Every rank but this one."""
        return (rank for rank in range(self.count) if rank != self.rank)

    def round_trips(self, nbytes: int, rounds: int) -> list[float]:
        """Seconds of each of ``rounds`` in which ``nbytes`` go once round all ranks, as rank 0 sees them: ``count`` hops each."""
        held, found = torch.zeros(nbytes, dtype=torch.uint8, device=self._device), []
        before, behind = self.before((self.rank - 1) % self.count), self.behind((self.rank + 1) % self.count)
        for _ in range(rounds):
            begun = time.perf_counter()
            if self.rank:
                before.receive(held)
                behind.send(held)
            else:
                behind.send(held)
                before.receive(torch.empty_like(held))
            self.settle()
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            found.append(time.perf_counter() - begun)
        return found

    def settle(self) -> None:
        """Return when all that was sent has gone."""
        self._sent.settle()

    def expect(self, parts: int) -> None:
        """A pass comes of so many parts: a rank may be so many ahead of the next one, which it must not wait for."""
        self._sent.most = MOST_SENT + parts

    def close(self, broken: bool = False) -> None:
        """Give the communicators back. ``broken``: another rank is gone, and kernels may be waiting for it."""
        if broken:
            self._sent.clear()
        else:
            self.settle()
        for group in reversed(self._groups):
            if broken:
                group.abort()
            else:
                dist.destroy_process_group(group)
        self._groups.clear()

    def _group(self, ranks: list[int]) -> dist.ProcessGroup:
        """Of NCCL. All ranks ask for all groups, in the same order."""
        made = dist.new_group(ranks, backend="nccl", device_id=self._device, timeout=PATIENCE)
        if self.rank in ranks:
            self._groups.append(made)
        return made

    def _warm_up(self, ways: Sequence[tuple[int, int]]) -> None:
        """Each pair once, in an order in which nobody waits for ever: the first hop of a pair makes its connection."""
        sample = torch.zeros(_TRIED, dtype=torch.uint8, device=self._device)
        for source, target in ways:
            if self.rank == source:
                self.behind(target).send(sample)
            if self.rank == target:
                self.before(source).receive(torch.empty_like(sample))
        for first in range(self.count):
            for second in range(first + 1, self.count):
                for source, target in ((first, second), (second, first)):
                    if self.rank == source:
                        self.of(target).send(sample)
                    if self.rank == target:
                        self.of(source).receive(torch.empty_like(sample))
        self.settle()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self.meter.received = self.meter.received_bytes = self.meter.sent_bytes = 0
        self.meter.waited_s = 0.0


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).view(-1) if tensor.dim() else tensor.view(1).view(torch.uint8)

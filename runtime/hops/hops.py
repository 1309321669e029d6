"""All ways of a rank: between the cards of a host that reach each other by copies, else by torch.distributed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from penstock.runtime.company.company import PATIENCE
from penstock.runtime.hops.card_lane import CardLane
from penstock.runtime.hops.computing_stream import ComputingStream
from penstock.runtime.hops.hop import Hop, HopMeter
from penstock.runtime.hops.peer_places import PeerPlaces
from penstock.runtime.hops.peer_ways import PeerWays
from penstock.runtime.hops.torch_hop import MOST_SENT, Sent, StagedHop, TorchHop
from penstock.runtime.memory.device import CudaDevice
from penstock.runtime.memory.vram_handles import VramHandles

_TRIED = 16 << 10
"""Bytes of a hop that warms a pair up."""
_SAID = 4096
"""Bytes in which a rank says what the others need of its card."""


class Hops:
    """All ways of ``rank`` among those of all ranks, ``ways`` (from, to), by which a pass goes round; these are warmed up. All ranks make
    theirs at the same time. ``without_cards`` is a group of gloo, which stays its giver's. By it goes all without cards, and of ranks on
    ``one_card`` where copies are refused.

    ``copied``: whether all ranks are on one host, so that copies are tried. NCCL's ways are communicators with a stream each, so that
    nothing on its way from here holds up what comes. Costs the buffers of either: some tens of MB of VRAM, and with NCCL some hundreds.
    """

    def __init__(
        self,
        rank: int,
        ways: Sequence[tuple[int, int]],
        device: torch.device,
        without_cards: dist.ProcessGroup,
        one_card: bool = False,
        copied: bool = True,
    ):
        self.rank, self.count = rank, 1 + max(map(max, ways))
        self.meter = HopMeter()
        self._sent = Sent()
        self._device = device
        self._groups: list[dist.ProcessGroup] = []
        self._peers: PeerWays | None = None
        self.refused: str | None = None
        """Why hops between cards are not copies; None where they are, or where there are no cards."""
        by_cards = device.type == "cuda"
        if by_cards:
            self._peers, self.refused = self._met(ways, without_cards) if copied else (None, "ranks of several hosts")
        self._staged = by_cards and one_card
        self._before: dict[int, Hop] = {}
        self._behind: dict[int, Hop] = {}
        if self._peers is not None:
            self._before = {one: self._peers.before(one) for one, other in ways if other == rank}
            self._behind = {other: self._peers.behind(other) for one, other in ways if one == rank}
        else:
            if by_cards and not one_card:
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
        return self._hop(self._every, peer) if self._peers is None else self._peers.of(peer)

    def _hop(self, group: dist.ProcessGroup, peer: int) -> Hop:
        hop = TorchHop(group, peer, self.meter, self._sent)
        return StagedHop(hop) if self._staged else hop

    def _met(self, ways: Sequence[tuple[int, int]], group: dist.ProcessGroup) -> tuple[PeerWays | None, str | None]:
        """Copies between the cards; None, and why not."""
        device = self._device
        torch.zeros(1, device=device)  # the calling thread has the card's context current from now on
        lock = CudaDevice(device.index)

        def exchange(words: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
            return exchanged(self.rank, self.count, group, words)

        places, computing = PeerPlaces(self.count, ways), ComputingStream(device)
        made = PeerWays(self.rank, places, exchange, VramHandles(), lock, lambda: CardLane(device), computing, self.meter)
        return (made, None) if made.refused is None else (None, made.refused)

    @property
    def by(self) -> str:
        """By what hidden states go."""
        return "copies" if self._peers is not None else "gloo" if self._staged or self._device.type == "cpu" else "NCCL"

    def facts(self) -> dict[str, Any]:
        """What went, by what, and why not by copies where cards have none."""
        return {**asdict(self.meter), "by": self.by, "refused": self.refused}

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
        if self._peers is not None:
            self._peers.settle()

    def expect(self, parts: int) -> None:
        """A pass comes of so many parts: a rank may be so many ahead of the next one, which it must not wait for. None is kept beyond them:
        a part comes round when the next rank has taken that part of the layer before."""
        self._sent.most = parts if parts > 1 else MOST_SENT

    def let_go(self) -> None:
        """Another rank is gone: nothing of this one waits for it any more, until :meth:`close`."""
        if self._peers is not None:
            self._peers.let_go()

    def close(self, broken: bool = False) -> None:
        """Give back what hops took. ``broken``: another rank is gone, and kernels may be waiting for it."""
        if broken:
            self._sent.clear()
        else:
            self.settle()
        if self._peers is not None:
            self._peers.close(broken)
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


def exchanged(rank: int, count: int, group: dist.ProcessGroup, words: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What each of ``count`` ranks has for ``words``, by ``group`` of gloo. All call it at the same time."""
    said = torch.frombuffer(bytearray(json.dumps(words).encode().ljust(_SAID)), dtype=torch.uint8)
    others = [other for other in range(count) if other != rank]
    sending = [dist.isend(said, other, group=group) for other in others]
    heard = {rank: said}
    for other in others:
        heard[other] = torch.empty_like(said)
        dist.recv(heard[other], other, group=group)
    for work in sending:
        if work is not None:
            work.wait()
    return [json.loads(bytes(heard[number].tolist())) for number in range(count)]
